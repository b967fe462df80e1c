# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    nomad = {
      "source"  = "hashicorp/nomad"
      "version" = ">= 2.4"
    }
  }
}

variable "files" {
  type        = list(string)
  description = "Files of the workload."
}

resource "nomad_job" "this" {
  for_each = toset(var.files)
  jobspec  = file(each.value)
  detach   = false
}
