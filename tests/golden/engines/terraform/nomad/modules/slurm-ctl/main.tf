# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    nomad = {
      "source"  = "hashicorp/nomad"
      "version" = ">= 2.4"
    }
  }
}

variable "file" {
  type        = string
  description = "File of the workload."
}

resource "nomad_job" "this" {
  jobspec = file(var.file)
  detach  = false

  timeouts {
    create = "24h"
    update = "24h"
  }
}
