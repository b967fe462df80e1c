# Written by `sms export nomad`. Changes belong into the site file.
job "slurm-ctl" {
  type        = "service"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "default"
  priority    = 95

  group "slurmctld" {
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

      port "port_6817" {
        static = 6817
      }

      port "probe" {
        static = 16817
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
        destination = "local/config/slurm.cgroup.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Read by slurmd on the nodes, distributed with slurm.conf.
CgroupPlugin=cgroup/v1
END
      }

      template {
        destination = "local/config/slurm.slurm.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Written by sms from the site file. A slurm.conf of the provisioning node
# replaces this file through file synchronisation.
ClusterName=sample
SlurmctldHost=admin-1(10.20.0.8)
SlurmctldHost=sms-services(10.20.0.1)
SlurmUser=slurm
AuthType=auth/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key
SlurmctldPort=6817
SlurmdPort=6818
SlurmctldPidFile=/run/slurmctld/slurmctld.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
# Nodes fetch this file from the controller (slurmd --conf-server).
SlurmctldParameters=enable_configless
MaxNodeCount=1024
ReturnToService=2
SlurmctldTimeout=120
SlurmdTimeout=300
# Ends an allocation whose srun or salloc is gone, as after a restore or a failover.
InactiveLimit=600
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/usr/bin/mail
AccountingStorageType=accounting_storage/slurmdbd
# Nodes get this file, too: sacct and sacctmgr on them connect to the container.
AccountingStorageHost=10.20.0.8
SlurmctldDebug=info
NodeName=node[1-3] NodeAddr=10.20.1.[1-3] CPUs=4 RealMemory=2048 State=UNKNOWN
NodeName=gpu1 CPUs=8 RealMemory=4096 Feature=gpu State=CLOUD
PartitionName=batch Nodes=ALL Default=YES MaxTime=24:00:00 state=DRAIN
PropagateResourceLimitsExcept=MEMLOCK
END
      }

      template {
        destination = "local/config/sms.services.json"
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
  "sssd": {
   "run": [
    "sssd",
    "--interactive",
    "--logger=stderr"
   ],
   "user": "root",
   "groups": [],
   "capabilities": [
    0,
    1,
    3,
    5,
    6,
    7
   ],
   "setup": "[ -s /etc/sssd/sssd.conf ] || { echo \"/etc/sssd/sssd.conf is missing: set secrets.sssd_conf\" >&2; exit 1; }\ninstall -d -m 0755 /var/lib/sss /var/lib/sss/mc /var/lib/sss/pipes /var/lib/sss/pubconf /var/log/sssd\ninstall -d -m 0755 /var/lib/sss/deskprofile /var/lib/sss/gpo_cache /var/lib/sss/keytabs\ninstall -d -m 0700 /var/lib/sss/db /var/lib/sss/pipes/private /var/lib/sss/secrets\nrm -f /run/sssd.pid\n# What packages of Debian do when they are installed.\n[ -e /etc/nsswitch.conf ] || cp /usr/etc/nsswitch.conf /etc/nsswitch.conf\nsed -i -E '/^(passwd|group):/{/ sss/!s/$/ sss/}' /etc/nsswitch.conf\n",
   "unclean": "",
   "running": null,
   "needs": [],
   "sync": [],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "/opt/sms/bin/sms-sssd-alive"
     ]
    ],
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [],
    "signal": "TERM",
    "stop_s": 30,
    "release_s": 0,
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
   "setup": "",
   "unclean": "",
   "running": null,
   "needs": [
    "munge",
    "sssd"
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
     "munge"
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
  },
  "slurmctld": {
   "run": [
    "slurmctld",
    "-D"
   ],
   "user": "slurm",
   "groups": [
    "postdrop",
    "maildrop"
   ],
   "capabilities": [],
   "setup": "install -d -o slurm -g slurm -m 0755 /run/slurmctld /var/log/slurm\ninstall -d -o slurm -g slurm -m 0700 /var/spool/slurmctld\n# Of an image in which slurm had other ids.\nfind /var/spool/slurmctld /var/log/slurm ! -user slurm -exec chown -h slurm:slurm {} +\nif [ -n \"$${SMS_UNCLEAN:-}\" ]; then\n/opt/sms/bin/sms-slurm-ids /var/spool/slurmctld/job_state\nfi\n",
   "unclean": "/opt/sms/bin/sms-slurm-ids /var/spool/slurmctld/job_state",
   "running": "/var/spool/slurmctld/.sms-running",
   "needs": [
    "munge",
    "slurmdbd",
    "sssd"
   ],
   "sync": [
    "/etc/slurm/slurm.conf"
   ],
   "probe": {
    "kind": "exec",
    "exec": [
     [
      "sh",
      "-euc",
      "from=$${SLURM_CONF:-/etc/slurm/slurm.conf}\nown=$(mktemp)\nsed -E '/^ *SlurmctldHost *=/I{x;s/^/x/;/^xx/{x;d};x};s#^( *Include +)([^/ ])#\\1/etc/slurm/\\2#I' \"$from\" >\"$own\"\nexec 3<\"$own\"\nrm \"$own\"\nSLURM_CONF=/dev/fd/3 exec scontrol ping\n"
     ]
    ],
    "expect": "Slurmctld[(]primary[)] at .* is UP",
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [
     "munge"
    ],
    "signal": "TERM",
    "stop_s": 60,
    "release_s": 0,
    "lease": "/var/spool/slurmctld",
    "outlived": false,
    "ports": [
     6817
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
{"path": "/etc/slurm/cgroup.conf", "source": "/sms/config/slurm.cgroup.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/slurm.conf", "source": "/sms/config/slurm.slurm.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/sms/services.json", "source": "/sms/config/sms.services.json", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/jwt_hs256.key", "source": "/dev/null", "owner": "slurm", "group": "slurm", "mode": "0600"},
{"path": "/etc/munge/munge.key", "source": "/dev/null", "owner": "munge", "group": "munge", "mode": "0600"},
{"path": "/etc/sssd/sssd.conf", "source": "/dev/null", "owner": "root", "group": "root", "mode": "0600"}
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

    task "munge" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "130s"

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/spool/slurmctld",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss",
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
          "/var/lib/sms/nomad/sample/var/spool/slurmctld:/var/spool/slurmctld",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss:/var/lib/sss",
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
        data        = "{{ with nomadVar \"nomad/jobs/slurm-ctl\" }}{{ .munge_key.Value | base64Decode }}{{ end }}"
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
        name     = "slurmctld-munge-check"
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

    task "sssd" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "130s"

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/spool/slurmctld",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss",
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
          "/var/lib/sms/nomad/sample/var/spool/slurmctld:/var/spool/slurmctld",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss:/var/lib/sss",
          "--bind",
          "${NOMAD_SECRETS_DIR}/sssd.conf:/etc/sssd/sssd.conf",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "sssd",
        ]
      }

      template {
        destination = "secrets/sssd.conf"
        perms       = "0600"
        change_mode = "noop"
        data        = "{{ with nomadVar \"nomad/jobs/slurm-ctl\" }}{{ .sssd_conf.Value | base64Decode }}{{ end }}"
        uid         = 0
        gid         = 0
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
        name     = "slurmctld-sssd-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/sssd"
          interval = "10s"
          timeout  = "7s"
          name     = "sssd is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/sssd"
          interval = "10s"
          timeout  = "7s"
          name     = "sssd is alive"

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

    task "slurmctld" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "130s"
      leader       = true

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/spool/slurmctld",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss",
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
          "/var/lib/sms/nomad/sample/var/spool/slurmctld:/var/spool/slurmctld",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss:/var/lib/sss",
          "--bind",
          "${NOMAD_SECRETS_DIR}/jwt_hs256.key:/etc/slurm/jwt_hs256.key",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "slurmctld",
        ]
      }

      template {
        destination = "secrets/jwt_hs256.key"
        perms       = "0600"
        change_mode = "noop"
        data        = "{{ with nomadVar \"nomad/jobs/slurm-ctl\" }}{{ .jwt_key.Value | base64Decode }}{{ end }}"
        uid         = 64030
        gid         = 64030
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
        name     = "slurmctld"
        provider = "nomad"
        port     = "port_6817"
      }

      service {
        name     = "slurmctld-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/slurmctld"
          interval = "10s"
          timeout  = "7s"
          name     = "slurmctld is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/slurmctld"
          interval = "10s"
          timeout  = "7s"
          name     = "slurmctld is alive"

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
          "var/spool/slurmctld",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss",
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
          "/var/lib/sms/nomad/sample/var/spool/slurmctld:/var/spool/slurmctld",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss:/var/lib/sss",
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
