# Written by `sms export terraform`. Changes belong into the site file.
terraform {
  required_providers {
    kubernetes = {
      "source"  = "hashicorp/kubernetes"
      "version" = ">= 2.30"
    }
  }
}

variable "files" {
  type        = list(string)
  description = "Files of the workload."
}

resource "kubernetes_manifest" "this" {
  for_each = merge([for path in var.files : { for text in split("\n---\n", file(path)) : "${yamldecode(text).kind}/${yamldecode(text).metadata.name}" => yamldecode(text) }]...)
  manifest = each.value
}
