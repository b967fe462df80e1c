# Written by `sms export nomad`. Changes belong into the site file.
job "munge" {
  type        = "system"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "compute"
  priority    = 95

  group "munge" {
    restart {
      attempts = 3
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    task "munge" {
      driver = "raw_exec"
      user   = "munge"

      config {
        command = "/usr/sbin/munged"
        args    = ["--foreground", "--syslog"]
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
