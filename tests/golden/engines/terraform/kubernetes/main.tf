# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    kubernetes = {
      "source"  = "hashicorp/kubernetes"
      "version" = ">= 2.30"
    }
  }
}

module "namespace" {
  source = "./modules/namespace"
  files  = ["${path.root}/files/namespace.yaml"]
}

module "slurmdbd" {
  source     = "./modules/slurmdbd"
  files      = ["${path.root}/files/slurmdbd.yaml"]
  depends_on = [module.namespace]
}

module "slurmctld" {
  source     = "./modules/slurmctld"
  files      = ["${path.root}/files/slurmctld.yaml"]
  depends_on = [module.namespace, module.slurmdbd]
}
