# Written by `sms export nomad`. Changes belong into the site file.
job "rsyslog" {
  type        = "service"
  namespace   = "default"
  datacenters = ["dc1"]
  node_pool   = "default"
  priority    = 95

  group "rsyslog" {
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

      port "port_514" {
        static = 514
      }

      port "port_2514" {
        static = 2514
      }

      port "probe" {
        static = 10514
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
          "/var/lib/sms/nomad/sample",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "var/log",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
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
          "/var/lib/sms/nomad/sample/var/log:/var/log",
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
        destination = "local/config/logrotate.d.sms-messages"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Every five minutes (/etc/cron.d/sms). All rotated messages together take a sixteenth of the overlay at most.
/var/log/messages {
    daily
    maxsize 16777216
    rotate 100
    compress
    missingok
    notifempty
    create 0640 syslog syslog
    postrotate
        kill -HUP "$(cat /run/rsyslog/rsyslogd.pid)"
    endscript
    lastaction
        while oldest=$(ls -t /var/log/messages.* 2>/dev/null | tail -n 1) && [ -n "$oldest" ] &&
            [ "$(cat /var/log/messages.* | wc -c)" -gt 134217728 ]; do
            rm -f "$oldest"
        done
    endscript
}
/var/log/sms/syslog-probe {
    size 256k
    rotate 1
    missingok
    create 0640 syslog syslog
    postrotate
        kill -HUP "$(cat /run/rsyslog/rsyslogd.pid)"
    endscript
}
END
      }

      template {
        destination = "local/config/passwd"
        perms       = "0444"
        change_mode = "noop"
        data        = "alice:x:2001:2001:Alice Example:/home/alice:/bin/bash\n"
      }

      template {
        destination = "local/config/rsyslog.conf"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
# Receives the system log of every node.
# The usual limit of 1024 is less than the sessions below: without a descriptor left, a rotated log is not opened again, and
# lines are acknowledged that are written nowhere.
$MaxOpenFiles 8192
global(workDirectory="/var/spool/rsyslog" maxMessageSize="64k")
# /dev/log is a link to it.
module(load="imuxsock" SysSock.Name="/run/rsyslog/socket")
module(load="imudp")
module(load="imtcp" maxSessions="2000" keepAlive="on")
# imrelp has no limit of sessions: the rules of `nat` have it.
module(load="imrelp")
input(type="imudp" port="514")
input(type="imtcp" port="514")
input(type="imrelp" port="2514" keepAlive="on")
template(name="messages" type="string" string="%timegenerated:::date-rfc3339% %HOSTNAME% %syslogtag%%msg:::sp-if-no-1st-sp%%msg:::drop-last-lf%\n")
# A node that floods it must not fill the file system that Slurm's controller saves its state on: a file that reaches its
# size is emptied, after a copy that replaces the last one.
$FileCreateMode 0640
$outchannel messages,/var/log/messages,33554432,/opt/sms/bin/sms-log-full /var/log/messages
$outchannel probe,/var/log/sms/syslog-probe,1048576,/opt/sms/bin/sms-log-full /var/log/sms/syslog-probe
# Lines of the probe and cron's heartbeat are too many for the log.
if $programname == 'sms-probe' and $fromhost-ip == '127.0.0.1' then {
    :omfile:$probe;messages
    stop
}
if $programname == 'CRON' and ($msg contains 'cron-heartbeat' or $msg contains 'session') then stop
# The site's collector, with a queue on disk for its outages. The connection is probed: what is written to a dead
# connection is lost.
action(type="omfwd" target="loghost.example.org" port="5140" protocol="tcp"
       queue.type="LinkedList" queue.filename="forward" queue.maxDiskSpace="64m" queue.saveOnShutdown="on"
       action.resumeRetryCount="-1" action.resumeInterval="5"
       keepAlive="on" keepAlive.time="10" keepAlive.interval="5" keepAlive.probes="3")
*.* :omfile:$messages;messages
END
      }

      template {
        destination = "local/config/sms.services.json"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
{
 "services": {
  "rsyslog": {
   "run": [
    "rsyslogd",
    "-n",
    "-i",
    "/run/rsyslog/rsyslogd.pid"
   ],
   "user": "syslog",
   "groups": [],
   "capabilities": [
    10
   ],
   "setup": "install -d -o syslog -g syslog -m 0755 /run/rsyslog\nrm -f /run/rsyslog/rsyslogd.pid\nln -sfn /run/rsyslog/socket /dev/log\n# In folders that are not its own: it can write these files, and no others there.\ntouch /var/log/messages /var/log/sms/syslog-probe\nchown syslog:syslog /var/log/messages /var/log/sms/syslog-probe\nchmod 0640 /var/log/messages /var/log/sms/syslog-probe\ninstall -d -m 0700 /var/spool/rsyslog\nchown -R syslog:syslog /var/spool/rsyslog\n",
   "unclean": "",
   "running": null,
   "needs": [],
   "sync": [],
   "probe": {
    "kind": "syslog",
    "syslog": "127.0.0.1",
    "file": "/var/log/sms/syslog-probe",
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
     514,
     2514
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
{"path": "/etc/logrotate.d/sms-messages", "source": "/sms/config/logrotate.d.sms-messages", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/passwd", "source": "/sms/config/passwd", "owner": "root", "group": "root", "mode": "0644"},
{"path": "/etc/rsyslog.conf", "source": "/sms/config/rsyslog.conf", "owner": "root", "group": "root", "mode": "0644"},
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

    task "rsyslog" {
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
          "var/log",
          "var/spool/rsyslog",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
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
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_BIND_SERVICE,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "/var/lib/sms/nomad/sample/var/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/spool/rsyslog:/var/spool/rsyslog",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/opt/sms/bin/sms-run",
          "--jobsync",
          "rsyslog",
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
        name     = "rsyslog"
        provider = "nomad"
        port     = "port_514"
      }

      service {
        name     = "rsyslog-check"
        provider = "nomad"
        port     = "probe"
        address  = "127.0.0.1"

        check {
          type     = "http"
          port     = "probe"
          path     = "/ready/rsyslog"
          interval = "10s"
          timeout  = "7s"
          name     = "rsyslog is ready"
        }

        check {
          type     = "http"
          port     = "probe"
          path     = "/live/rsyslog"
          interval = "10s"
          timeout  = "7s"
          name     = "rsyslog is alive"

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
          "var/log",
          "var/spool/rsyslog",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
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
          "/var/lib/sms/nomad/sample/var/log:/var/log",
          "--bind",
          "/var/lib/sms/nomad/sample/var/spool/rsyslog:/var/spool/rsyslog",
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
