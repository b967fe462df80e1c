# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    kubernetes = {
      "source"  = "hashicorp/kubernetes"
      "version" = ">= 2.30"
    }
  }
}

module "slurmdbd" {
  source = "./modules/slurmdbd"
  file   = "${path.module}/files/slurmdbd.yaml"
}

module "slurmctld" {
  source     = "./modules/slurmctld"
  file       = "${path.module}/files/slurmctld.yaml"
  depends_on = [module.slurmdbd]
}
