# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    nomad = {
      "source"  = "hashicorp/nomad"
      "version" = ">= 2.4"
    }
  }
}

module "slurmdbd" {
  source = "./modules/slurmdbd"
  file   = "${path.module}/files/slurmdbd.nomad.hcl"
}

module "slurm-ctl" {
  source     = "./modules/slurm-ctl"
  file       = "${path.module}/files/slurm-ctl.nomad.hcl"
  depends_on = [module.slurmdbd]
}

module "munge" {
  source     = "./modules/munge"
  file       = "${path.module}/files/munge.nomad.hcl"
  depends_on = [module.slurm-ctl]
}

module "slurm-cn" {
  source     = "./modules/slurm-cn"
  file       = "${path.module}/files/slurm-cn.nomad.hcl"
  depends_on = [module.slurm-ctl, module.munge]
}
