# Written by `sms export nomad`. Changes belong into the site file.
job "postfix" {
  type        = "service"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "default"
  priority    = 95

  group "postfix" {
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

      port "port_25" {
        static = 25
      }

      port "probe" {
        static = 10025
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
        destination = "local/config/aliases"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
postmaster: root
root: operators@example.org
END
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
        destination = "local/config/postfix.main.cf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Whole numbers: every Postfix in use accepts them.
compatibility_level = 2
myhostname = sms-services.sample.example.org
myorigin = sample.example.org
mydestination = $myhostname, sms-services, localhost
mynetworks = 127.0.0.0/8 10.20.0.0/16
# Only nodes may relay.
smtpd_relay_restrictions = permit_mynetworks, reject
inet_interfaces = all
inet_protocols = ipv4
smtp_host_lookup = native
relayhost = [mail.example.org]:25
alias_maps = $default_database_type:/etc/aliases
alias_database = $default_database_type:/etc/aliases
mail_spool_directory = /var/mail/
disable_vrfy_command = yes
# Mail is refused, and senders keep it, before it takes the room that Slurm's controller needs.
queue_minfree = 536870912
message_size_limit = 10240000
biff = no
maillog_file = /dev/stdout
END
      }

      template {
        destination = "local/config/sms.services.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
{
 "services": {
  "postfix": {
   "run": [
    "sh",
    "-c",
    "exec \"$(postconf -h daemon_directory)/master\" -d"
   ],
   "user": "root",
   "groups": [],
   "capabilities": [
    1,
    5,
    6,
    7,
    10,
    18
   ],
   "setup": "# A fresh folder on other engines.\ninstall -d -o postfix -m 0700 \"$(postconf -h data_directory)\"\npostalias /etc/aliases\npostfix -c /etc/postfix check\n",
   "unclean": "",
   "running": null,
   "needs": [],
   "sync": [],
   "probe": {
    "kind": "smtp",
    "smtp": "127.0.0.1",
    "timeout_s": 5
   },
   "jobsync": {
    "holds": [],
    "signal": "TERM",
    "stop_s": 30,
    "release_s": 0,
    "lease": null,
    "outlived": false,
    "ports": [
     25
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
{"path": "/etc/aliases", "source": "/sms/config/aliases", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/group", "source": "/sms/config/group", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/passwd", "source": "/sms/config/passwd", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/postfix/main.cf", "source": "/sms/config/postfix.main.cf", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/sms/services.json", "source": "/sms/config/sms.services.json", "owner": "root", "group": "root", "mode": "0644"}
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

    task "postfix" {
      driver       = "raw_exec"
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "40s"
      leader       = true

      config {
        command = "/bin/sh"
        args    = [
          "-eu",
          "local/verified.sh",
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/mail",
          "var/spool/postfix",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/postfix",
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
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_BIND_SERVICE,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID,CAP_SYS_CHROOT",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/mail:/var/mail",
          "--bind",
          "/var/lib/sms/nomad/sample/var/spool/postfix:/var/spool/postfix",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/postfix:/var/lib/postfix",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "postfix",
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
        name     = "postfix"
        provider = "nomad"
        port     = "port_25"
      }

      service {
        name     = "postfix-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/postfix"
          interval = "10s"
          timeout  = "7s"
          name     = "postfix is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/postfix"
          interval = "10s"
          timeout  = "7s"
          name     = "postfix is alive"

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
          "var/mail",
          "var/spool/postfix",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "${NOMAD_ALLOC_DIR}/data/var/lib/postfix",
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
          "/var/lib/sms/nomad/sample/var/mail:/var/mail",
          "--bind",
          "/var/lib/sms/nomad/sample/var/spool/postfix:/var/spool/postfix",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/var/lib/postfix:/var/lib/postfix",
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
