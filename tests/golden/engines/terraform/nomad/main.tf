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
  files  = ["${path.root}/files/slurmdbd.nomad.hcl"]
}

module "slurm-ctl" {
  source     = "./modules/slurm-ctl"
  files      = ["${path.root}/files/slurm-ctl.nomad.hcl"]
  depends_on = [module.slurmdbd]
}

module "munge" {
  source     = "./modules/munge"
  files      = ["${path.root}/files/munge.nomad.hcl"]
  depends_on = [module.slurm-ctl]
}

module "slurm-cn" {
  source     = "./modules/slurm-cn"
  files      = ["${path.root}/files/slurm-cn.nomad.hcl"]
  depends_on = [module.slurm-ctl, module.munge]
}
