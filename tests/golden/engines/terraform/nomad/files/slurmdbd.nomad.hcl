job "slurmdbd" {
  type        = "service"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "default"
  priority    = 95

  group "slurmdbd" {
    count = 1

    constraint {
      attribute = "${attr.unique.hostname}"
      operator  = "="
      value     = "admin-1"
    }

    constraint {
      attribute = "${attr.kernel.name}"
      operator  = "="
      value     = "linux"
    }

    disconnect {
      replace              = false
      stop_on_client_after = "30s"
    }

    update {
      max_parallel      = 1
      health_check      = "checks"
      min_healthy_time  = "10s"
      healthy_deadline  = "5m"
      progress_deadline = "10m"
      auto_revert       = true
    }

    restart {
      attempts = 3
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    reschedule {
      attempts  = 0
      unlimited = false
    }

    network {
      mode = "host"

      port "port_6819" {
        static = 6819
      }

      port "probe" {
        static = 16819
      }
    }

    volume "state" {
      type   = "host"
      source = "sms-sample"
    }

    task "place" {
      driver = "raw_exec"
      user   = "root"

      lifecycle {
        hook    = "prestart"
        sidecar = false
      }

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--no-mount",
          "sys",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_TASK_DIR}/config:/sms/config",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/sms/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-place",
          "/sms/config/files.json",
          "/sms/etc",
        ]
      }

      template {
        destination = "local/config/group"
        perms       = "0444"
        change_mode = "noop"
        data        = "alice:x:2001:\n"
      }

      template {
        destination = "local/config/passwd"
        perms       = "0444"
        change_mode = "noop"
        data        = "alice:x:2001:2001:Alice Example:/home/alice:/bin/bash\n"
      }

      template {
        destination = "local/config/slurm.slurm.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
ClusterName=sample
SlurmctldHost=admin-1(10.20.0.8)
SlurmctldHost=sms-services(10.20.0.1)
SlurmUser=slurm
AuthType=auth/munge
SlurmctldPort=6817
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=10.20.0.8
END
      }

      template {
        destination = "local/config/slurm.slurmdbd.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
PidFile=/run/slurmdbd/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
# No StoragePass: MariaDB authenticates the user by the socket.
DebugLevel=info
END
      }

      template {
        destination = "local/config/sms.services.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
{
 "services": {
  "mariadb": {
   "run": [
    "mariadbd",
    "--no-defaults",
    "--datadir=/var/lib/mysql",
    "--socket=/run/mysqld/mysqld.sock",
    "--skip-networking",
    "--innodb-buffer-pool-size=128M",
    "--innodb-lock-wait-timeout=900"
   ],
   "user": "mysql",
   "groups": [],
   "capabilities": [],
   "setup": "install -d -o mysql -g mysql -m 0755 /run/mysqld\ninstall -d -o mysql -g mysql -m 0700 /var/lib/mysql\n# The image has no database: the first start on an overlay makes one, complete or not at all.\nif [ ! -e /var/lib/mysql/sms-initialised ]; then\n  find /var/lib/mysql -mindepth 1 ! -name '.sms-*' -delete\n  mariadb-install-db --no-defaults --user=mysql --datadir=/var/lib/mysql --auth-root-authentication-method=socket \\\n    --skip-test-db >/var/log/sms/mariadb-install.log 2>&1\n  touch /var/lib/mysql/sms-initialised\nfi\n",
   "unclean": "",
   "running": null,
   "needs": [],
   "sync": [],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "mariadb-admin",
      "--no-defaults",
      "--socket=/run/mysqld/mysqld.sock",
      "ping"
     ]
    ],
    "expect": "alive",
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [],
    "signal": "TERM",
    "stop_s": 120,
    "release_s": 60,
    "lease": "/var/lib/mysql",
    "outlived": false,
    "ports": []
   }
  },
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
   "needs": [],
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
    "release_s": 60,
    "lease": null,
    "outlived": false,
    "ports": []
   }
  },
  "slurmdbd": {
   "run": [
    "slurmdbd",
    "-D"
   ],
   "user": "slurm",
   "groups": [],
   "capabilities": [],
   "setup": "install -d -o slurm -g slurm -m 0755 /run/slurmdbd /var/log/slurm\n# The login goes by the user behind the socket: there is no password to keep.\nmariadb --no-defaults --socket=/run/mysqld/mysqld.sock <<'SQL'\nCREATE DATABASE IF NOT EXISTS slurm_acct_db;\nCREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;\nGRANT ALL ON slurm_acct_db.* TO slurm@localhost;\nSQL\n",
   "unclean": "",
   "running": null,
   "needs": [
    "munge",
    "mariadb"
   ],
   "sync": [],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "sacctmgr",
      "--noheader",
      "--parsable2",
      "list",
      "cluster",
      "format=cluster"
     ]
    ],
    "timeout_s": 10.0
   },
   "jobsync": {
    "holds": [
     "munge",
     "mariadb"
    ],
    "signal": "TERM",
    "stop_s": 60,
    "release_s": 0,
    "lease": null,
    "outlived": false,
    "ports": [
     6819
    ]
   }
  }
 }
}
END
      }

      template {
        destination = "local/config/files.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
[
{"path": "/etc/group", "source": "/sms/config/group", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/passwd", "source": "/sms/config/passwd", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/slurm.conf", "source": "/sms/config/slurm.slurm.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/slurmdbd.conf", "source": "/sms/config/slurm.slurmdbd.conf", "owner": "slurm", "group": "slurm", "mode": "0600"},
{"path": "/etc/sms/services.json", "source": "/sms/config/sms.services.json", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/munge/munge.key", "source": "/dev/null", "owner": "munge", "group": "munge", "mode": "0600"}
]
END
      }

      template {
        destination = "local/verified.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/keys/0.pub"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
-----BEGIN PUBLIC KEY-----
not a key
-----END PUBLIC KEY-----
END
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }

    task "mariadb" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "220s"

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/lib/mysql",
          "var/lib/mysql-dump",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--no-mount",
          "sys",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql:/var/lib/mysql",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql-dump:/var/lib/mysql-dump",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "mariadb",
        ]
      }

      template {
        destination = "local/verified.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/keys/0.pub"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
-----BEGIN PUBLIC KEY-----
not a key
-----END PUBLIC KEY-----
END
      }

      service {
        name     = "slurmdbd-mariadb-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/mariadb"
          interval = "10s"
          timeout  = "7s"
          name     = "mariadb is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/mariadb"
          interval = "10s"
          timeout  = "7s"
          name     = "mariadb is alive"

          check_restart {
            limit = 6
            grace = "120s"
          }
        }
      }

      resources {
        cpu    = 50
        memory = 512
      }
    }

    task "munge" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "220s"

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/lib/mysql",
          "var/lib/mysql-dump",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--no-mount",
          "sys",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql:/var/lib/mysql",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql-dump:/var/lib/mysql-dump",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_SECRETS_DIR}/munge.key:/etc/munge/munge.key",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "munge",
        ]
      }

      template {
        destination = "secrets/munge.key"
        perms       = "0600"
        change_mode = "noop"
        data        = "{{ with nomadVar \"nomad/jobs/slurmdbd\" }}{{ .munge_key.Value | base64Decode }}{{ end }}"
        uid         = 351
        gid         = 351
      }

      template {
        destination = "local/verified.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/keys/0.pub"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
-----BEGIN PUBLIC KEY-----
not a key
-----END PUBLIC KEY-----
END
      }

      service {
        name     = "slurmdbd-munge-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/munge"
          interval = "10s"
          timeout  = "7s"
          name     = "munge is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/munge"
          interval = "10s"
          timeout  = "7s"
          name     = "munge is alive"

          check_restart {
            limit = 6
            grace = "120s"
          }
        }
      }

      resources {
        cpu    = 50
        memory = 128
      }
    }

    task "slurmdbd" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "220s"
      leader       = true

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/lib/mysql",
          "var/lib/mysql-dump",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--no-mount",
          "sys",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql:/var/lib/mysql",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql-dump:/var/lib/mysql-dump",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "slurmdbd",
        ]
      }

      template {
        destination = "local/verified.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/keys/0.pub"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
-----BEGIN PUBLIC KEY-----
not a key
-----END PUBLIC KEY-----
END
      }

      service {
        name     = "slurmdbd"
        provider = "nomad"
        port     = "port_6819"
      }

      service {
        name     = "slurmdbd-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/slurmdbd"
          interval = "10s"
          timeout  = "12s"
          name     = "slurmdbd is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/slurmdbd"
          interval = "10s"
          timeout  = "12s"
          name     = "slurmdbd is alive"

          check_restart {
            limit = 6
            grace = "120s"
          }
        }
      }

      resources {
        cpu    = 50
        memory = 256
      }
    }

    task "probe" {
      driver = "raw_exec"
      user   = "root"

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/lib/mysql",
          "var/lib/mysql-dump",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--no-mount",
          "sys",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql:/var/lib/mysql",
          "--bind",
          "/var/lib/sms/nomad/sample/var/lib/mysql-dump:/var/lib/mysql-dump",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-probe",
          "--serve",
          "127.0.0.1:${NOMAD_PORT_probe}",
        ]
      }

      template {
        destination = "local/verified.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/keys/0.pub"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
-----BEGIN PUBLIC KEY-----
not a key
-----END PUBLIC KEY-----
END
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
