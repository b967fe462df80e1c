# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    kubernetes = {
      "source"  = "hashicorp/kubernetes"
      "version" = ">= 2.30"
    }
  }
}

variable "file" {
  type        = string
  description = "File of the workload."
}

resource "kubernetes_manifest" "this" {
  for_each = { for object in [for text in split("\n---\n", file(var.file)) : yamldecode(text)] : "${object.kind}/${object.metadata.name}" => object }
  manifest = each.value

  dynamic "wait" {
    for_each = each.value.kind == "StatefulSet" ? [true] : []

    content {
      rollout = wait.value
    }
  }

  timeouts {
    create = "24h"
    update = "24h"
  }
}
