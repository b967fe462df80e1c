# Written by `sms export nomad`. Changes belong into the site file.
job "login" {
  type        = "service"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "default"
  priority    = 95

  group "login" {
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

      port "port_2222" {
        static = 2222
      }

      port "probe" {
        static = 12222
      }
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
        destination = "local/config/pam.d.sshd"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#%PAM-1.0
# Written by sms. Users of passwd have no line in shadow: they log in with keys.
auth     sufficient                          pam_sss.so
auth     required                            pam_deny.so
account  required                            pam_unix.so broken_shadow
account  [default=bad success=ok user_unknown=ignore authinfo_unavail=ignore] pam_sss.so
session  required                            pam_unix.so
session  optional                            pam_sss.so
session  optional                            pam_mkhomedir.so umask=0077
END
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
    "release_s": 30,
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
  "login": {
   "run": [
    "/usr/sbin/sshd",
    "-D",
    "-e",
    "-f",
    "/etc/ssh/sms.conf"
   ],
   "user": "root",
   "groups": [],
   "capabilities": [
    0,
    1,
    3,
    5,
    6,
    7,
    18,
    29
   ],
   "setup": "[ -s /etc/ssh/ssh_host_ed25519_key ] ||\n  { echo \"/etc/ssh/ssh_host_ed25519_key is missing: set secrets.ssh_host_key\" >&2; exit 1; }\ninstall -d -m 0755 /run/sshd\n# A volume of an engine is open to everybody; a home of another file system keeps its mode.\n[ \"$(stat -c %u:%a /home)\" != 0:777 ] || chmod 0755 /home\n",
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
      "ssh-keyscan",
      "-T",
      "4",
      "-t",
      "ed25519",
      "-p",
      "2222",
      "127.0.0.1"
     ]
    ],
    "expect": "ssh-ed25519",
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
    "outlived": false,
    "ports": [
     2222
    ]
   }
  }
 }
}
END
      }

      template {
        destination = "local/config/ssh.sms.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Written by sms from the site file: logins of users over SSH.
Port 2222
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile none
UsePAM yes
PermitRootLogin no
KbdInteractiveAuthentication no
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication yes
AuthorizedKeysCommand /usr/bin/sss_ssh_authorizedkeys
AuthorizedKeysCommandUser nobody
PrintMotd no
X11Forwarding no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
END
      }

      template {
        destination = "local/config/files.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
[
{"path": "/etc/group", "source": "/sms/config/group", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/pam.d/sshd", "source": "/sms/config/pam.d.sshd", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/passwd", "source": "/sms/config/passwd", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/cgroup.conf", "source": "/sms/config/slurm.cgroup.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/slurm/slurm.conf", "source": "/sms/config/slurm.slurm.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/sms/services.json", "source": "/sms/config/sms.services.json", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/ssh/sms.conf", "source": "/sms/config/ssh.sms.conf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/munge/munge.key", "source": "/dev/null", "owner": "munge", "group": "munge", "mode": "0600"},
{"path": "/etc/ssh/ssh_host_ed25519_key", "source": "/dev/null", "owner": "root", "group": "root", "mode": "0600"},
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
      kill_timeout = "100s"

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
          "${NOMAD_ALLOC_DIR}/data/home",
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
          "${NOMAD_ALLOC_DIR}/data/home:/home",
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
        data        = "{{ with nomadVar \"nomad/jobs/login\" }}{{ .munge_key.Value | base64Decode }}{{ end }}"
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
        name     = "login-munge-check"
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
      kill_timeout = "100s"

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
          "${NOMAD_ALLOC_DIR}/data/home",
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
          "${NOMAD_ALLOC_DIR}/data/home:/home",
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
        data        = "{{ with nomadVar \"nomad/jobs/login\" }}{{ .sssd_conf.Value | base64Decode }}{{ end }}"
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
        name     = "login-sssd-check"
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

    task "login" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "100s"
      leader       = true

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
          "${NOMAD_ALLOC_DIR}/data/home",
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
          "CAP_AUDIT_WRITE,CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID,CAP_SYS_CHROOT",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/home:/home",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/munge:/var/lib/munge",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/sss:/var/lib/sss",
          "--bind",
          "${NOMAD_SECRETS_DIR}/ssh_host_ed25519_key:/etc/ssh/ssh_host_ed25519_key",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "login",
        ]
      }

      template {
        destination = "secrets/ssh_host_ed25519_key"
        perms       = "0600"
        change_mode = "noop"
        data        = "{{ with nomadVar \"nomad/jobs/login\" }}{{ .ssh_host_key.Value | base64Decode }}{{ end }}"
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
        name     = "login"
        provider = "nomad"
        port     = "port_2222"
      }

      service {
        name     = "login-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/login"
          interval = "10s"
          timeout  = "7s"
          name     = "login is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/login"
          interval = "10s"
          timeout  = "7s"
          name     = "login is alive"

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
          "",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/home",
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
          "${NOMAD_ALLOC_DIR}/data/home:/home",
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
