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

    update {
      max_parallel = 1
    }

    task "munge" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "70s"

      config {
        command = "/usr/bin/python3"
        args    = [
          "local/sms/sms-run",
          "--services",
          "local/sms/services.json",
          "--jobsync",
          "munge",
        ]
      }

      template {
        destination = "local/sms/sms-probe"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/sms-run"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smsfiles.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smslease.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smsrt.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smsserve.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smsstart.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smssync.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/smstask.py"
        perms       = "0444"
        change_mode = "noop"
        data        = "a program\n"
      }

      template {
        destination = "local/sms/services.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
{
 "services": {
  "munge": {
   "run": [
    "munged",
    "--foreground"
   ],
   "user": "munge",
   "groups": [],
   "capabilities": [],
   "setup": "# munged refuses folders that others may write to, and leaves its socket behind when killed.\ninstall -d -o munge -g munge -m 0755 /run/munge\ninstall -d -o munge -g munge -m 0700 /var/lib/munge /var/log/munge /etc/munge\nfind /var/lib/munge /var/log/munge /etc/munge ! -user munge -exec chown -h munge:munge {} +\nchmod 0600 /etc/munge/munge.key\nrm -f /run/munge/munge.socket.2 /run/munge/munge.socket.2.lock\n",
   "unclean": "",
   "running": null,
   "saves": null,
   "needs": [],
   "after": [],
   "sync": [],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "munge",
      "--no-input"
     ],
     [
      "unmunge"
     ]
    ],
    "expect": "STATUS: +Success",
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [],
    "signal": "TERM",
    "stop_s": 30,
    "release_s": 30,
    "lease": null,
    "outlived": false,
    "ports": []
   }
  },
  "slurmd": {
   "run": [
    "slurmd",
    "-D",
    "--conf-server",
    "10.20.0.8:6817"
   ],
   "user": "root",
   "groups": [],
   "capabilities": null,
   "setup": "mkdir -p /run/slurm /var/spool/slurmd",
   "unclean": "",
   "running": null,
   "saves": null,
   "needs": [
    "munge"
   ],
   "after": [],
   "sync": [],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "scontrol",
      "show",
      "slurmd"
     ]
    ],
    "expect": "Slurmd PID",
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [
     "munge"
    ],
    "signal": "TERM",
    "stop_s": 30,
    "release_s": 0,
    "lease": null,
    "outlived": true,
    "ports": []
   }
  }
 }
}
END
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
