# Written by `sms export nomad`. Changes belong into the site file.
job "slurm-cn" {
  type        = "system"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "compute"
  priority    = 95

  group "slurm-cn" {
    restart {
      attempts = 3
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    network {
      mode = "host"

      port "port_6818" {
        static = 6818
      }
    }

    task "slurm-cn" {
      driver = "raw_exec"
      user   = "root"

      config {
        command = "/usr/sbin/slurmd"
        args    = [
          "-D",
          "-Z",
          "--conf-server",
          "10.20.0.8:6817",
          "--conf",
          "Feature=compute",
        ]
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
