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
          "${NOMAD_TASK_DIR}/empty",
          "${NOMAD_ALLOC_DIR}/data/etc",
          "${NOMAD_ALLOC_DIR}/data/run",
          "${NOMAD_ALLOC_DIR}/data/log",
          "--",
          "--no-home",
          "--contain",
          "--cleanenv",
          "--env",
          "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}",
          "--pid",
          "--no-init",
          "--ipc",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--security",
          "seccomp:${NOMAD_TASK_DIR}/seccomp.json",
          "--no-mount",
          "sys",
          "--no-mount",
          "/etc/localtime",
          "--no-mount",
          "/etc/hosts",
          "--bind=/proc/sys:/proc/sys:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/acpi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/asound:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/bus:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/fs:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/irq:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/scsi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/sys/fs:ro",
          "--bind=/dev/null:/proc/kcore:ro",
          "--bind=/dev/null:/proc/keys:ro",
          "--bind=/dev/null:/proc/sched_debug:ro",
          "--bind=/dev/null:/proc/sysrq-trigger:ro",
          "--bind=/dev/null:/proc/timer_list:ro",
          "--bind",
          "${NOMAD_TASK_DIR}/config:/sms/config",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/etc:/sms/etc",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/run:/run",
          "--bind",
          "${NOMAD_ALLOC_DIR}/data/log:/var/log",
          "--bind",
          "${NOMAD_TASK_DIR}/confined.sh:/mnt/confined.sh:ro",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/bin/sh",
          "-eu",
          "/mnt/confined.sh",
          "8683",
          "ipc mnt pid",
          "@HOST@",
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
# Written by sms from the site file.
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
   "setup": "[ -s /etc/sssd/sssd.conf ] || { echo \"/etc/sssd/sssd.conf is missing: set secrets.sssd_conf\" >&2; exit 1; }\ninstall -d -m 0755 /var/lib/sss /var/lib/sss/mc /var/lib/sss/pipes /var/lib/sss/pubconf /var/log/sssd\ninstall -d -m 0755 /var/lib/sss/deskprofile /var/lib/sss/gpo_cache /var/lib/sss/keytabs\ninstall -d -m 0700 /var/lib/sss/db /var/lib/sss/pipes/private /var/lib/sss/secrets\nrm -f /run/sssd.pid\n# What another configuration has cached would hide that this one finds no user. It is back if that configuration is.\n( cd /var/lib/sss/db\n  sum=$(sha256sum </etc/sssd/sssd.conf)\n  was=$(cat .conf 2>/dev/null || echo \"$sum\")\n  if [ \"$was\" != \"$sum\" ]; then\n    rm -rf .leaving\n    mkdir -p .leaving\n    find . -maxdepth 1 -name '*.ldb' -exec mv -t .leaving {} +\n    [ \"$(cat .before/.conf 2>/dev/null)\" != \"$sum\" ] || find .before -name '*.ldb' -exec mv -t . {} +\n    echo \"$was\" >.leaving/.conf\n    rm -rf .before\n    mv .leaving .before\n  fi\n  echo \"$sum\" >.conf )\n# What packages of Debian do when they are installed.\n[ -e /etc/nsswitch.conf ] || cp /usr/etc/nsswitch.conf /etc/nsswitch.conf\nsed -i -E '/^(passwd|group):/{/ sss/!s/$/ sss/}' /etc/nsswitch.conf\n",
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
   "saves": null,
   "needs": [
    "munge",
    "sssd"
   ],
   "after": [
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
    exec unshare --mount --propagation slave /bin/sh -eu "$NOMAD_TASK_DIR/run-image.sh" once '' '' '' apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/run-image.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# run-image KIND OVERLAY MODE IMAGE COMMAND...: run a command of Apptainer, in the mount namespace that unshare(1) has made for it.
# KIND is start, join or once. OVERLAY, if not empty: an overlay that nobody uses, whose files are data for the command: what a
# container with this IMAGE would see is a folder of this namespace, for the word @OVERLAY@; MODE is ro or rw.
# @HOST@ in COMMAND: the namespaces of this host, which definitions/scripts/confined compares. A mount over a part of /proc that
# this host lacks (--bind=PATH:/proc/...:ro) is left out.
#
# A program of Apptainer is the executable of the container's first process and, for a moment, of each that joins it: root in the
# container could change it by /proc/PID/exe, as the host's devices by their mounts. Here both are mounted read-only.
kind=$1 overlay=$2 mode=$3 image=$4
shift 4
fail() { echo "$1" >&2; exit 1; }
check_layers() {
    for layer in upper work; do # the kernel would follow a link, which a snapshot of elsewhere may have
        if [ -L "$place/data/$layer" ] || [ ! -d "$place/data/$layer" ]; then fail "$overlay has no folder /$layer"; fi
    done
}
# Where packages and builds have the starter.
found=
bin=$(readlink -f "$(command -v apptainer || echo /usr/bin/apptainer)")
for folder in /usr/lib/*-linux-gnu*/apptainer "$${bin%/bin/*}/libexec/apptainer" /usr/lib/apptainer /usr/libexec/apptainer; do
    [ ! -e "$folder/bin/starter" ] || found="$found $(readlink -f "$folder")"
done
[ -n "$found" ] || found=$(apptainer buildcfg LIBEXECDIR)/apptainer
for folder in $found; do
    mount -o bind,ro "$folder" "$folder"
done
mountpoint -q /dev || mount --rbind /dev /dev
mount -o remount,bind,ro /dev
# What was opened before is still on the host's own mount, and /proc/PID/fd leads to it.
# shellcheck disable=SC3013 # dash has it
[ ! /proc/self/fd/0 -ef /dev/null ] || exec </dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/1 -ef /dev/null ] || exec >/dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/2 -ef /dev/null ] || exec 2>/dev/null
if [ "$kind" = start ]; then
    # The output of the container's first process: bounded, and not on a disk of the host.
    logs=$${APPTAINER_CONFIGDIR:-~root/.apptainer}/instances/logs
    mkdir -p "$logs"
    mount -t tmpfs -o size=1m,nr_inodes=64,mode=700,nosuid,nodev,noexec sms-output "$logs"
fi
if [ -n "$overlay" ]; then
    place=/run/sms/overlay
    (umask 077; mkdir -p $place)
    mount -t tmpfs -o size=64k,mode=700,nosuid,nodev,noexec sms-overlay $place
    mkdir $place/image $place/data $place/files
    part=$(apptainer sif list "$image" | sed -n 's/^[0-9]* *|[^|]*|[^|]*|\([0-9]*-[0-9]*\) *|FS (Squashfs\/\*System.*/\1/p')
    case $part in '' | *[!0-9-]*) fail "$image has not one squashfs file system" ;; esac
    from=$${part%-*}
    # Not by mount(8): it refuses a file of which another loop device has a part, as that of an instance with this image.
    lower=$(losetup --find --show --read-only --offset "$from" --sizelimit $(($${part#*-} - from)) "$image")
    mount -t squashfs -o ro,nosuid,nodev "$lower" $place/image || { losetup --detach "$lower"; exit 1; }
    losetup --detach "$lower" # when it is unmounted
    if [ "$mode" = ro ]; then
        mount -t ext3 -o loop,ro,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/data/upper:$place/image
    else
        mount -t ext3 -o loop,noatime,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/image,upperdir=$place/data/upper,workdir=$place/data/work
    fi
    mount -t overlay -o "$mode,nosuid,nodev,$layers" sms-overlay $place/files
fi
# Of a process that stays: the kernel gives the number of a namespace that has ended to a new one.
stays=$PPID
[ -e "/proc/$stays/ns/mnt" ] || stays=1
host=
for word in $(cd "/proc/$stays/ns" && stat -Lc %n=%i ipc mnt net pid uts); do
    host="$host $word"
done
count=$#
while [ "$count" -gt 0 ]; do
    word=$1
    shift
    count=$((count - 1))
    case $word in
        @HOST@) word=$host ;;
        @OVERLAY@:*) word=$place/files:$${word#*:} ;;
        --bind=*:/proc/*:ro)
            path=$${word#*:}
            [ -e "$${path%:ro}" ] || continue
            ;;
    esac
    set -- "$@" "$word"
done
[ -n "$overlay" ] || exec "$@"
device=$(findmnt -no SOURCE "$place/data")
behind=$(losetup -nO BACK-FILE "$device")
status=0
"$@" || status=$?
umount "$place/files" "$place/data" "$place/image"
# The kernel ends the last mount a moment after the last process; until then nobody else may use the overlay.
tries=0
while [ "$tries" -lt 500 ] && [ "$(losetup -nO BACK-FILE "$device" 2>/dev/null)" = "$behind" ]; do
    sleep 0.02
    tries=$((tries + 1))
done
[ "$tries" -lt 500 ] || fail "the overlay is still in use: $overlay"
exit "$status"
END
      }

      template {
        destination = "local/confined.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# confined CAPABILITIES NAMES HOST COMMAND...: run a command, if this process is confined: it has other namespaces of these NAMES
# (as /proc/self/ns has them) than the HOST, no other capabilities than CAPABILITIES (a number, a bit each), a filter of system
# calls, cannot gain privileges, and cannot write to /proc/sys and the parts of /proc that control the host. It runs in the image,
# as the first program of a run.
fail() { echo "this run of the image is not confined: $1" >&2; exit 70; }
allowed=$1 names=$2 host=$3
shift 3
# shellcheck disable=SC2086 # a list of names
own=$(cd /proc/self/ns && stat -Lc %n=%i $names) || fail "its namespaces are not known"
for word in $own; do
    case " $host " in
        *" $word "*) fail "it is in the host's namespace: $${word%=*}" ;;
        *" $${word%=*}="[1-9]*) ;;
        *) fail "the namespaces of the host are not known" ;;
    esac
done
privileges='' filter='' bounds=''
while read -r key value; do
    case $key in
        CapInh: | CapPrm: | CapEff: | CapBnd: | CapAmb:)
            [ "$((0x$value & ~allowed))" = 0 ] || fail "$key $value"
            bounds=$bounds$key
            ;;
        NoNewPrivs:) privileges=$value ;;
        Seccomp:) filter=$value ;;
    esac
done </proc/self/status
case $bounds in *CapPrm:*CapBnd:*) ;; *) fail "its capabilities are not known" ;; esac
[ "$privileges" = 1 ] || fail "programs can gain privileges (no_new_privs)"
[ "$filter" = 2 ] || fail "system calls are not filtered (seccomp)"
mounts=' '
while read -r _ _ _ _ point options _; do
    case $point in /proc/*) mounts="$mounts$point=$options, " ;; esac
done </proc/self/mountinfo
# READ_ONLY, HIDDEN_FOLDERS and HIDDEN_FILES of appliance/plan/services/confinement.py
for path in /proc/sys /proc/acpi /proc/asound /proc/bus /proc/fs /proc/irq /proc/scsi /proc/sys/fs \
    /proc/kcore /proc/keys /proc/sched_debug /proc/sysrq-trigger /proc/timer_list; do
    # The last mount covers the others.
    case $${mounts##* "$path"=} in
        ro,*) ;;
        *) [ ! -e "$path" ] || fail "$path is the host's" ;;
    esac
done
exec "$@"
END
      }

      template {
        destination = "local/seccomp.json"
        perms       = "0444"
        change_mode = "noop"
        data        = "{\"comment\":\"What is not listed is answered with ENOSYS, because nobody traces: programs fall back to other calls.\",\"defaultAction\":\"SCMP_ACT_TRACE\",\"architectures\":[],\"syscalls\":[{\"names\":[\"accept\",\"accept4\",\"access\",\"adjtimex\",\"alarm\",\"arch_prctl\",\"bind\",\"brk\",\"cachestat\",\"capget\",\"capset\",\"chdir\",\"chmod\",\"chown\",\"chroot\",\"clock_adjtime\",\"clock_getres\",\"clock_gettime\",\"clock_nanosleep\",\"close\",\"close_range\",\"connect\",\"copy_file_range\",\"creat\",\"dup\",\"dup2\",\"dup3\",\"epoll_create\",\"epoll_create1\",\"epoll_ctl\",\"epoll_pwait\",\"epoll_pwait2\",\"epoll_wait\",\"eventfd\",\"eventfd2\",\"execve\",\"execveat\",\"exit\",\"exit_group\",\"faccessat\",\"faccessat2\",\"fadvise64\",\"fallocate\",\"fchdir\",\"fchmod\",\"fchmodat\",\"fchmodat2\",\"fchown\",\"fchownat\",\"fcntl\",\"fdatasync\",\"fgetxattr\",\"flistxattr\",\"flock\",\"fork\",\"fremovexattr\",\"fsetxattr\",\"fstat\",\"fstatfs\",\"fsync\",\"ftruncate\",\"futex\",\"futex_requeue\",\"futex_wait\",\"futex_waitv\",\"futex_wake\",\"futimesat\",\"get_mempolicy\",\"get_robust_list\",\"get_thread_area\",\"getcpu\",\"getcwd\",\"getdents\",\"getdents64\",\"getegid\",\"geteuid\",\"getgid\",\"getgroups\",\"getitimer\",\"getpeername\",\"getpgid\",\"getpgrp\",\"getpid\",\"getppid\",\"getpriority\",\"getrandom\",\"getresgid\",\"getresuid\",\"getrlimit\",\"getrusage\",\"getsid\",\"getsockname\",\"getsockopt\",\"gettid\",\"gettimeofday\",\"getuid\",\"getxattr\",\"getxattrat\",\"inotify_add_watch\",\"inotify_init\",\"inotify_init1\",\"inotify_rm_watch\",\"io_cancel\",\"io_destroy\",\"io_getevents\",\"io_pgetevents\",\"io_setup\",\"io_submit\",\"ioctl\",\"ioprio_get\",\"ioprio_set\",\"kill\",\"landlock_add_rule\",\"landlock_create_ruleset\",\"landlock_restrict_self\",\"lchown\",\"lgetxattr\",\"link\",\"linkat\",\"listen\",\"listmount\",\"listxattr\",\"listxattrat\",\"llistxattr\",\"lremovexattr\",\"lseek\",\"lsetxattr\",\"lsm_get_self_attr\",\"lsm_list_modules\",\"lsm_set_self_attr\",\"lstat\",\"madvise\",\"map_shadow_stack\",\"membarrier\",\"memfd_create\",\"memfd_secret\",\"mincore\",\"mkdir\",\"mkdirat\",\"mknod\",\"mknodat\",\"mlock\",\"mlock2\",\"mlockall\",\"mmap\",\"mprotect\",\"mq_getsetattr\",\"mq_notify\",\"mq_open\",\"mq_timedreceive\",\"mq_timedsend\",\"mq_unlink\",\"mremap\",\"mseal\",\"msgctl\",\"msgget\",\"msgrcv\",\"msgsnd\",\"msync\",\"munlock\",\"munlockall\",\"munmap\",\"name_to_handle_at\",\"nanosleep\",\"newfstatat\",\"open\",\"openat\",\"openat2\",\"pause\",\"pidfd_open\",\"pidfd_send_signal\",\"pipe\",\"pipe2\",\"pkey_alloc\",\"pkey_free\",\"pkey_mprotect\",\"poll\",\"ppoll\",\"prctl\",\"pread64\",\"preadv\",\"preadv2\",\"prlimit64\",\"process_mrelease\",\"pselect6\",\"pwrite64\",\"pwritev\",\"pwritev2\",\"read\",\"readahead\",\"readlink\",\"readlinkat\",\"readv\",\"recvfrom\",\"recvmmsg\",\"recvmsg\",\"removexattr\",\"removexattrat\",\"rename\",\"renameat\",\"renameat2\",\"restart_syscall\",\"rmdir\",\"rseq\",\"rt_sigaction\",\"rt_sigpending\",\"rt_sigprocmask\",\"rt_sigqueueinfo\",\"rt_sigreturn\",\"rt_sigsuspend\",\"rt_sigtimedwait\",\"rt_tgsigqueueinfo\",\"sched_get_priority_max\",\"sched_get_priority_min\",\"sched_getaffinity\",\"sched_getattr\",\"sched_getparam\",\"sched_getscheduler\",\"sched_rr_get_interval\",\"sched_setaffinity\",\"sched_setattr\",\"sched_setparam\",\"sched_setscheduler\",\"sched_yield\",\"seccomp\",\"select\",\"semctl\",\"semget\",\"semop\",\"semtimedop\",\"sendfile\",\"sendmmsg\",\"sendmsg\",\"sendto\",\"set_robust_list\",\"set_thread_area\",\"set_tid_address\",\"setfsgid\",\"setfsuid\",\"setgid\",\"setgroups\",\"setitimer\",\"setpgid\",\"setpriority\",\"setregid\",\"setresgid\",\"setresuid\",\"setreuid\",\"setrlimit\",\"setsid\",\"setsockopt\",\"setuid\",\"setxattr\",\"setxattrat\",\"shmat\",\"shmctl\",\"shmdt\",\"shmget\",\"shutdown\",\"sigaltstack\",\"signalfd\",\"signalfd4\",\"socketpair\",\"splice\",\"stat\",\"statfs\",\"statmount\",\"statx\",\"symlink\",\"symlinkat\",\"sync\",\"sync_file_range\",\"sync_file_range2\",\"syncfs\",\"sysinfo\",\"tee\",\"tgkill\",\"time\",\"timer_create\",\"timer_delete\",\"timer_getoverrun\",\"timer_gettime\",\"timer_settime\",\"timerfd_create\",\"timerfd_gettime\",\"timerfd_settime\",\"times\",\"tkill\",\"truncate\",\"umask\",\"uname\",\"unlink\",\"unlinkat\",\"utime\",\"utimensat\",\"utimes\",\"vfork\",\"vmsplice\",\"wait4\",\"waitid\",\"write\",\"writev\"],\"action\":\"SCMP_ACT_ALLOW\"},{\"comment\":\"processes and threads, without CLONE_NEW*\",\"names\":[\"clone\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060288,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"the same: slurmrestd leaves shared semaphores\",\"names\":[\"unshare\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060416,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"AF_UNIX\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":1,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET6\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":10,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_NETLINK\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":16,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_PACKET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":17,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"Linux\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":0,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"query\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":4294967295,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"file systems are mounted by the host only\",\"names\":[\"fsconfig\",\"fsmount\",\"fsopen\",\"fspick\",\"mount\",\"mount_setattr\",\"move_mount\",\"open_tree\",\"open_tree_attr\",\"pivot_root\",\"umount2\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"no other namespaces; clone3 is not listed: no filter can read its flags, and programs fall back to clone\",\"names\":[\"setns\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"the kernel and its configuration\",\"names\":[\"_sysctl\",\"acct\",\"bpf\",\"clock_settime\",\"create_module\",\"delete_module\",\"finit_module\",\"get_kernel_syms\",\"init_module\",\"ioperm\",\"iopl\",\"kexec_file_load\",\"kexec_load\",\"lookup_dcookie\",\"modify_ldt\",\"nfsservctl\",\"perf_event_open\",\"query_module\",\"quotactl\",\"quotactl_fd\",\"reboot\",\"setdomainname\",\"sethostname\",\"settimeofday\",\"swapoff\",\"swapon\",\"sysfs\",\"syslog\",\"uselib\",\"ustat\",\"vhangup\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"other processes: a tracer could also let calls pass that this filter answers\",\"names\":[\"kcmp\",\"pidfd_getfd\",\"process_madvise\",\"process_vm_readv\",\"process_vm_writev\",\"ptrace\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"kernel keys have no namespace\",\"names\":[\"add_key\",\"keyctl\",\"request_key\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"files by handle: past every folder of the host's file system\",\"names\":[\"open_by_handle_at\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"often the way into the kernel, and no daemon here needs them\",\"names\":[\"fanotify_init\",\"fanotify_mark\",\"io_uring_enter\",\"io_uring_register\",\"io_uring_setup\",\"remap_file_pages\",\"userfaultfd\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"placement of memory on the host's nodes\",\"names\":[\"mbind\",\"migrate_pages\",\"move_pages\",\"set_mempolicy\",\"set_mempolicy_home_node\"],\"action\":\"SCMP_ACT_ERRNO\"}]}\n"
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
          "${NOMAD_TASK_DIR}/empty",
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
          "--pid",
          "--no-init",
          "--ipc",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--security",
          "seccomp:${NOMAD_TASK_DIR}/seccomp.json",
          "--no-mount",
          "sys",
          "--no-mount",
          "/etc/localtime",
          "--no-mount",
          "/etc/hosts",
          "--bind=/proc/sys:/proc/sys:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/acpi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/asound:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/bus:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/fs:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/irq:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/scsi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/sys/fs:ro",
          "--bind=/dev/null:/proc/kcore:ro",
          "--bind=/dev/null:/proc/keys:ro",
          "--bind=/dev/null:/proc/sched_debug:ro",
          "--bind=/dev/null:/proc/sysrq-trigger:ro",
          "--bind=/dev/null:/proc/timer_list:ro",
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
          "--bind",
          "${NOMAD_TASK_DIR}/confined.sh:/mnt/confined.sh:ro",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/bin/sh",
          "-eu",
          "/mnt/confined.sh",
          "8683",
          "ipc mnt pid",
          "@HOST@",
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
    exec unshare --mount --propagation slave /bin/sh -eu "$NOMAD_TASK_DIR/run-image.sh" once '' '' '' apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/run-image.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# run-image KIND OVERLAY MODE IMAGE COMMAND...: run a command of Apptainer, in the mount namespace that unshare(1) has made for it.
# KIND is start, join or once. OVERLAY, if not empty: an overlay that nobody uses, whose files are data for the command: what a
# container with this IMAGE would see is a folder of this namespace, for the word @OVERLAY@; MODE is ro or rw.
# @HOST@ in COMMAND: the namespaces of this host, which definitions/scripts/confined compares. A mount over a part of /proc that
# this host lacks (--bind=PATH:/proc/...:ro) is left out.
#
# A program of Apptainer is the executable of the container's first process and, for a moment, of each that joins it: root in the
# container could change it by /proc/PID/exe, as the host's devices by their mounts. Here both are mounted read-only.
kind=$1 overlay=$2 mode=$3 image=$4
shift 4
fail() { echo "$1" >&2; exit 1; }
check_layers() {
    for layer in upper work; do # the kernel would follow a link, which a snapshot of elsewhere may have
        if [ -L "$place/data/$layer" ] || [ ! -d "$place/data/$layer" ]; then fail "$overlay has no folder /$layer"; fi
    done
}
# Where packages and builds have the starter.
found=
bin=$(readlink -f "$(command -v apptainer || echo /usr/bin/apptainer)")
for folder in /usr/lib/*-linux-gnu*/apptainer "$${bin%/bin/*}/libexec/apptainer" /usr/lib/apptainer /usr/libexec/apptainer; do
    [ ! -e "$folder/bin/starter" ] || found="$found $(readlink -f "$folder")"
done
[ -n "$found" ] || found=$(apptainer buildcfg LIBEXECDIR)/apptainer
for folder in $found; do
    mount -o bind,ro "$folder" "$folder"
done
mountpoint -q /dev || mount --rbind /dev /dev
mount -o remount,bind,ro /dev
# What was opened before is still on the host's own mount, and /proc/PID/fd leads to it.
# shellcheck disable=SC3013 # dash has it
[ ! /proc/self/fd/0 -ef /dev/null ] || exec </dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/1 -ef /dev/null ] || exec >/dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/2 -ef /dev/null ] || exec 2>/dev/null
if [ "$kind" = start ]; then
    # The output of the container's first process: bounded, and not on a disk of the host.
    logs=$${APPTAINER_CONFIGDIR:-~root/.apptainer}/instances/logs
    mkdir -p "$logs"
    mount -t tmpfs -o size=1m,nr_inodes=64,mode=700,nosuid,nodev,noexec sms-output "$logs"
fi
if [ -n "$overlay" ]; then
    place=/run/sms/overlay
    (umask 077; mkdir -p $place)
    mount -t tmpfs -o size=64k,mode=700,nosuid,nodev,noexec sms-overlay $place
    mkdir $place/image $place/data $place/files
    part=$(apptainer sif list "$image" | sed -n 's/^[0-9]* *|[^|]*|[^|]*|\([0-9]*-[0-9]*\) *|FS (Squashfs\/\*System.*/\1/p')
    case $part in '' | *[!0-9-]*) fail "$image has not one squashfs file system" ;; esac
    from=$${part%-*}
    # Not by mount(8): it refuses a file of which another loop device has a part, as that of an instance with this image.
    lower=$(losetup --find --show --read-only --offset "$from" --sizelimit $(($${part#*-} - from)) "$image")
    mount -t squashfs -o ro,nosuid,nodev "$lower" $place/image || { losetup --detach "$lower"; exit 1; }
    losetup --detach "$lower" # when it is unmounted
    if [ "$mode" = ro ]; then
        mount -t ext3 -o loop,ro,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/data/upper:$place/image
    else
        mount -t ext3 -o loop,noatime,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/image,upperdir=$place/data/upper,workdir=$place/data/work
    fi
    mount -t overlay -o "$mode,nosuid,nodev,$layers" sms-overlay $place/files
fi
# Of a process that stays: the kernel gives the number of a namespace that has ended to a new one.
stays=$PPID
[ -e "/proc/$stays/ns/mnt" ] || stays=1
host=
for word in $(cd "/proc/$stays/ns" && stat -Lc %n=%i ipc mnt net pid uts); do
    host="$host $word"
done
count=$#
while [ "$count" -gt 0 ]; do
    word=$1
    shift
    count=$((count - 1))
    case $word in
        @HOST@) word=$host ;;
        @OVERLAY@:*) word=$place/files:$${word#*:} ;;
        --bind=*:/proc/*:ro)
            path=$${word#*:}
            [ -e "$${path%:ro}" ] || continue
            ;;
    esac
    set -- "$@" "$word"
done
[ -n "$overlay" ] || exec "$@"
device=$(findmnt -no SOURCE "$place/data")
behind=$(losetup -nO BACK-FILE "$device")
status=0
"$@" || status=$?
umount "$place/files" "$place/data" "$place/image"
# The kernel ends the last mount a moment after the last process; until then nobody else may use the overlay.
tries=0
while [ "$tries" -lt 500 ] && [ "$(losetup -nO BACK-FILE "$device" 2>/dev/null)" = "$behind" ]; do
    sleep 0.02
    tries=$((tries + 1))
done
[ "$tries" -lt 500 ] || fail "the overlay is still in use: $overlay"
exit "$status"
END
      }

      template {
        destination = "local/confined.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# confined CAPABILITIES NAMES HOST COMMAND...: run a command, if this process is confined: it has other namespaces of these NAMES
# (as /proc/self/ns has them) than the HOST, no other capabilities than CAPABILITIES (a number, a bit each), a filter of system
# calls, cannot gain privileges, and cannot write to /proc/sys and the parts of /proc that control the host. It runs in the image,
# as the first program of a run.
fail() { echo "this run of the image is not confined: $1" >&2; exit 70; }
allowed=$1 names=$2 host=$3
shift 3
# shellcheck disable=SC2086 # a list of names
own=$(cd /proc/self/ns && stat -Lc %n=%i $names) || fail "its namespaces are not known"
for word in $own; do
    case " $host " in
        *" $word "*) fail "it is in the host's namespace: $${word%=*}" ;;
        *" $${word%=*}="[1-9]*) ;;
        *) fail "the namespaces of the host are not known" ;;
    esac
done
privileges='' filter='' bounds=''
while read -r key value; do
    case $key in
        CapInh: | CapPrm: | CapEff: | CapBnd: | CapAmb:)
            [ "$((0x$value & ~allowed))" = 0 ] || fail "$key $value"
            bounds=$bounds$key
            ;;
        NoNewPrivs:) privileges=$value ;;
        Seccomp:) filter=$value ;;
    esac
done </proc/self/status
case $bounds in *CapPrm:*CapBnd:*) ;; *) fail "its capabilities are not known" ;; esac
[ "$privileges" = 1 ] || fail "programs can gain privileges (no_new_privs)"
[ "$filter" = 2 ] || fail "system calls are not filtered (seccomp)"
mounts=' '
while read -r _ _ _ _ point options _; do
    case $point in /proc/*) mounts="$mounts$point=$options, " ;; esac
done </proc/self/mountinfo
# READ_ONLY, HIDDEN_FOLDERS and HIDDEN_FILES of appliance/plan/services/confinement.py
for path in /proc/sys /proc/acpi /proc/asound /proc/bus /proc/fs /proc/irq /proc/scsi /proc/sys/fs \
    /proc/kcore /proc/keys /proc/sched_debug /proc/sysrq-trigger /proc/timer_list; do
    # The last mount covers the others.
    case $${mounts##* "$path"=} in
        ro,*) ;;
        *) [ ! -e "$path" ] || fail "$path is the host's" ;;
    esac
done
exec "$@"
END
      }

      template {
        destination = "local/seccomp.json"
        perms       = "0444"
        change_mode = "noop"
        data        = "{\"comment\":\"What is not listed is answered with ENOSYS, because nobody traces: programs fall back to other calls.\",\"defaultAction\":\"SCMP_ACT_TRACE\",\"architectures\":[],\"syscalls\":[{\"names\":[\"accept\",\"accept4\",\"access\",\"adjtimex\",\"alarm\",\"arch_prctl\",\"bind\",\"brk\",\"cachestat\",\"capget\",\"capset\",\"chdir\",\"chmod\",\"chown\",\"chroot\",\"clock_adjtime\",\"clock_getres\",\"clock_gettime\",\"clock_nanosleep\",\"close\",\"close_range\",\"connect\",\"copy_file_range\",\"creat\",\"dup\",\"dup2\",\"dup3\",\"epoll_create\",\"epoll_create1\",\"epoll_ctl\",\"epoll_pwait\",\"epoll_pwait2\",\"epoll_wait\",\"eventfd\",\"eventfd2\",\"execve\",\"execveat\",\"exit\",\"exit_group\",\"faccessat\",\"faccessat2\",\"fadvise64\",\"fallocate\",\"fchdir\",\"fchmod\",\"fchmodat\",\"fchmodat2\",\"fchown\",\"fchownat\",\"fcntl\",\"fdatasync\",\"fgetxattr\",\"flistxattr\",\"flock\",\"fork\",\"fremovexattr\",\"fsetxattr\",\"fstat\",\"fstatfs\",\"fsync\",\"ftruncate\",\"futex\",\"futex_requeue\",\"futex_wait\",\"futex_waitv\",\"futex_wake\",\"futimesat\",\"get_mempolicy\",\"get_robust_list\",\"get_thread_area\",\"getcpu\",\"getcwd\",\"getdents\",\"getdents64\",\"getegid\",\"geteuid\",\"getgid\",\"getgroups\",\"getitimer\",\"getpeername\",\"getpgid\",\"getpgrp\",\"getpid\",\"getppid\",\"getpriority\",\"getrandom\",\"getresgid\",\"getresuid\",\"getrlimit\",\"getrusage\",\"getsid\",\"getsockname\",\"getsockopt\",\"gettid\",\"gettimeofday\",\"getuid\",\"getxattr\",\"getxattrat\",\"inotify_add_watch\",\"inotify_init\",\"inotify_init1\",\"inotify_rm_watch\",\"io_cancel\",\"io_destroy\",\"io_getevents\",\"io_pgetevents\",\"io_setup\",\"io_submit\",\"ioctl\",\"ioprio_get\",\"ioprio_set\",\"kill\",\"landlock_add_rule\",\"landlock_create_ruleset\",\"landlock_restrict_self\",\"lchown\",\"lgetxattr\",\"link\",\"linkat\",\"listen\",\"listmount\",\"listxattr\",\"listxattrat\",\"llistxattr\",\"lremovexattr\",\"lseek\",\"lsetxattr\",\"lsm_get_self_attr\",\"lsm_list_modules\",\"lsm_set_self_attr\",\"lstat\",\"madvise\",\"map_shadow_stack\",\"membarrier\",\"memfd_create\",\"memfd_secret\",\"mincore\",\"mkdir\",\"mkdirat\",\"mknod\",\"mknodat\",\"mlock\",\"mlock2\",\"mlockall\",\"mmap\",\"mprotect\",\"mq_getsetattr\",\"mq_notify\",\"mq_open\",\"mq_timedreceive\",\"mq_timedsend\",\"mq_unlink\",\"mremap\",\"mseal\",\"msgctl\",\"msgget\",\"msgrcv\",\"msgsnd\",\"msync\",\"munlock\",\"munlockall\",\"munmap\",\"name_to_handle_at\",\"nanosleep\",\"newfstatat\",\"open\",\"openat\",\"openat2\",\"pause\",\"pidfd_open\",\"pidfd_send_signal\",\"pipe\",\"pipe2\",\"pkey_alloc\",\"pkey_free\",\"pkey_mprotect\",\"poll\",\"ppoll\",\"prctl\",\"pread64\",\"preadv\",\"preadv2\",\"prlimit64\",\"process_mrelease\",\"pselect6\",\"pwrite64\",\"pwritev\",\"pwritev2\",\"read\",\"readahead\",\"readlink\",\"readlinkat\",\"readv\",\"recvfrom\",\"recvmmsg\",\"recvmsg\",\"removexattr\",\"removexattrat\",\"rename\",\"renameat\",\"renameat2\",\"restart_syscall\",\"rmdir\",\"rseq\",\"rt_sigaction\",\"rt_sigpending\",\"rt_sigprocmask\",\"rt_sigqueueinfo\",\"rt_sigreturn\",\"rt_sigsuspend\",\"rt_sigtimedwait\",\"rt_tgsigqueueinfo\",\"sched_get_priority_max\",\"sched_get_priority_min\",\"sched_getaffinity\",\"sched_getattr\",\"sched_getparam\",\"sched_getscheduler\",\"sched_rr_get_interval\",\"sched_setaffinity\",\"sched_setattr\",\"sched_setparam\",\"sched_setscheduler\",\"sched_yield\",\"seccomp\",\"select\",\"semctl\",\"semget\",\"semop\",\"semtimedop\",\"sendfile\",\"sendmmsg\",\"sendmsg\",\"sendto\",\"set_robust_list\",\"set_thread_area\",\"set_tid_address\",\"setfsgid\",\"setfsuid\",\"setgid\",\"setgroups\",\"setitimer\",\"setpgid\",\"setpriority\",\"setregid\",\"setresgid\",\"setresuid\",\"setreuid\",\"setrlimit\",\"setsid\",\"setsockopt\",\"setuid\",\"setxattr\",\"setxattrat\",\"shmat\",\"shmctl\",\"shmdt\",\"shmget\",\"shutdown\",\"sigaltstack\",\"signalfd\",\"signalfd4\",\"socketpair\",\"splice\",\"stat\",\"statfs\",\"statmount\",\"statx\",\"symlink\",\"symlinkat\",\"sync\",\"sync_file_range\",\"sync_file_range2\",\"syncfs\",\"sysinfo\",\"tee\",\"tgkill\",\"time\",\"timer_create\",\"timer_delete\",\"timer_getoverrun\",\"timer_gettime\",\"timer_settime\",\"timerfd_create\",\"timerfd_gettime\",\"timerfd_settime\",\"times\",\"tkill\",\"truncate\",\"umask\",\"uname\",\"unlink\",\"unlinkat\",\"utime\",\"utimensat\",\"utimes\",\"vfork\",\"vmsplice\",\"wait4\",\"waitid\",\"write\",\"writev\"],\"action\":\"SCMP_ACT_ALLOW\"},{\"comment\":\"processes and threads, without CLONE_NEW*\",\"names\":[\"clone\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060288,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"the same: slurmrestd leaves shared semaphores\",\"names\":[\"unshare\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060416,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"AF_UNIX\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":1,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET6\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":10,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_NETLINK\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":16,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_PACKET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":17,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"Linux\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":0,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"query\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":4294967295,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"file systems are mounted by the host only\",\"names\":[\"fsconfig\",\"fsmount\",\"fsopen\",\"fspick\",\"mount\",\"mount_setattr\",\"move_mount\",\"open_tree\",\"open_tree_attr\",\"pivot_root\",\"umount2\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"no other namespaces; clone3 is not listed: no filter can read its flags, and programs fall back to clone\",\"names\":[\"setns\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"the kernel and its configuration\",\"names\":[\"_sysctl\",\"acct\",\"bpf\",\"clock_settime\",\"create_module\",\"delete_module\",\"finit_module\",\"get_kernel_syms\",\"init_module\",\"ioperm\",\"iopl\",\"kexec_file_load\",\"kexec_load\",\"lookup_dcookie\",\"modify_ldt\",\"nfsservctl\",\"perf_event_open\",\"query_module\",\"quotactl\",\"quotactl_fd\",\"reboot\",\"setdomainname\",\"sethostname\",\"settimeofday\",\"swapoff\",\"swapon\",\"sysfs\",\"syslog\",\"uselib\",\"ustat\",\"vhangup\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"other processes: a tracer could also let calls pass that this filter answers\",\"names\":[\"kcmp\",\"pidfd_getfd\",\"process_madvise\",\"process_vm_readv\",\"process_vm_writev\",\"ptrace\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"kernel keys have no namespace\",\"names\":[\"add_key\",\"keyctl\",\"request_key\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"files by handle: past every folder of the host's file system\",\"names\":[\"open_by_handle_at\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"often the way into the kernel, and no daemon here needs them\",\"names\":[\"fanotify_init\",\"fanotify_mark\",\"io_uring_enter\",\"io_uring_register\",\"io_uring_setup\",\"remap_file_pages\",\"userfaultfd\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"placement of memory on the host's nodes\",\"names\":[\"mbind\",\"migrate_pages\",\"move_pages\",\"set_mempolicy\",\"set_mempolicy_home_node\"],\"action\":\"SCMP_ACT_ERRNO\"}]}\n"
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
          "${NOMAD_TASK_DIR}/empty",
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
          "--pid",
          "--no-init",
          "--ipc",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--security",
          "seccomp:${NOMAD_TASK_DIR}/seccomp.json",
          "--no-mount",
          "sys",
          "--no-mount",
          "/etc/localtime",
          "--no-mount",
          "/etc/hosts",
          "--bind=/proc/sys:/proc/sys:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/acpi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/asound:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/bus:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/fs:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/irq:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/scsi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/sys/fs:ro",
          "--bind=/dev/null:/proc/kcore:ro",
          "--bind=/dev/null:/proc/keys:ro",
          "--bind=/dev/null:/proc/sched_debug:ro",
          "--bind=/dev/null:/proc/sysrq-trigger:ro",
          "--bind=/dev/null:/proc/timer_list:ro",
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
          "--bind",
          "${NOMAD_TASK_DIR}/confined.sh:/mnt/confined.sh:ro",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/bin/sh",
          "-eu",
          "/mnt/confined.sh",
          "8683",
          "ipc mnt pid",
          "@HOST@",
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
    exec unshare --mount --propagation slave /bin/sh -eu "$NOMAD_TASK_DIR/run-image.sh" once '' '' '' apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/run-image.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# run-image KIND OVERLAY MODE IMAGE COMMAND...: run a command of Apptainer, in the mount namespace that unshare(1) has made for it.
# KIND is start, join or once. OVERLAY, if not empty: an overlay that nobody uses, whose files are data for the command: what a
# container with this IMAGE would see is a folder of this namespace, for the word @OVERLAY@; MODE is ro or rw.
# @HOST@ in COMMAND: the namespaces of this host, which definitions/scripts/confined compares. A mount over a part of /proc that
# this host lacks (--bind=PATH:/proc/...:ro) is left out.
#
# A program of Apptainer is the executable of the container's first process and, for a moment, of each that joins it: root in the
# container could change it by /proc/PID/exe, as the host's devices by their mounts. Here both are mounted read-only.
kind=$1 overlay=$2 mode=$3 image=$4
shift 4
fail() { echo "$1" >&2; exit 1; }
check_layers() {
    for layer in upper work; do # the kernel would follow a link, which a snapshot of elsewhere may have
        if [ -L "$place/data/$layer" ] || [ ! -d "$place/data/$layer" ]; then fail "$overlay has no folder /$layer"; fi
    done
}
# Where packages and builds have the starter.
found=
bin=$(readlink -f "$(command -v apptainer || echo /usr/bin/apptainer)")
for folder in /usr/lib/*-linux-gnu*/apptainer "$${bin%/bin/*}/libexec/apptainer" /usr/lib/apptainer /usr/libexec/apptainer; do
    [ ! -e "$folder/bin/starter" ] || found="$found $(readlink -f "$folder")"
done
[ -n "$found" ] || found=$(apptainer buildcfg LIBEXECDIR)/apptainer
for folder in $found; do
    mount -o bind,ro "$folder" "$folder"
done
mountpoint -q /dev || mount --rbind /dev /dev
mount -o remount,bind,ro /dev
# What was opened before is still on the host's own mount, and /proc/PID/fd leads to it.
# shellcheck disable=SC3013 # dash has it
[ ! /proc/self/fd/0 -ef /dev/null ] || exec </dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/1 -ef /dev/null ] || exec >/dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/2 -ef /dev/null ] || exec 2>/dev/null
if [ "$kind" = start ]; then
    # The output of the container's first process: bounded, and not on a disk of the host.
    logs=$${APPTAINER_CONFIGDIR:-~root/.apptainer}/instances/logs
    mkdir -p "$logs"
    mount -t tmpfs -o size=1m,nr_inodes=64,mode=700,nosuid,nodev,noexec sms-output "$logs"
fi
if [ -n "$overlay" ]; then
    place=/run/sms/overlay
    (umask 077; mkdir -p $place)
    mount -t tmpfs -o size=64k,mode=700,nosuid,nodev,noexec sms-overlay $place
    mkdir $place/image $place/data $place/files
    part=$(apptainer sif list "$image" | sed -n 's/^[0-9]* *|[^|]*|[^|]*|\([0-9]*-[0-9]*\) *|FS (Squashfs\/\*System.*/\1/p')
    case $part in '' | *[!0-9-]*) fail "$image has not one squashfs file system" ;; esac
    from=$${part%-*}
    # Not by mount(8): it refuses a file of which another loop device has a part, as that of an instance with this image.
    lower=$(losetup --find --show --read-only --offset "$from" --sizelimit $(($${part#*-} - from)) "$image")
    mount -t squashfs -o ro,nosuid,nodev "$lower" $place/image || { losetup --detach "$lower"; exit 1; }
    losetup --detach "$lower" # when it is unmounted
    if [ "$mode" = ro ]; then
        mount -t ext3 -o loop,ro,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/data/upper:$place/image
    else
        mount -t ext3 -o loop,noatime,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/image,upperdir=$place/data/upper,workdir=$place/data/work
    fi
    mount -t overlay -o "$mode,nosuid,nodev,$layers" sms-overlay $place/files
fi
# Of a process that stays: the kernel gives the number of a namespace that has ended to a new one.
stays=$PPID
[ -e "/proc/$stays/ns/mnt" ] || stays=1
host=
for word in $(cd "/proc/$stays/ns" && stat -Lc %n=%i ipc mnt net pid uts); do
    host="$host $word"
done
count=$#
while [ "$count" -gt 0 ]; do
    word=$1
    shift
    count=$((count - 1))
    case $word in
        @HOST@) word=$host ;;
        @OVERLAY@:*) word=$place/files:$${word#*:} ;;
        --bind=*:/proc/*:ro)
            path=$${word#*:}
            [ -e "$${path%:ro}" ] || continue
            ;;
    esac
    set -- "$@" "$word"
done
[ -n "$overlay" ] || exec "$@"
device=$(findmnt -no SOURCE "$place/data")
behind=$(losetup -nO BACK-FILE "$device")
status=0
"$@" || status=$?
umount "$place/files" "$place/data" "$place/image"
# The kernel ends the last mount a moment after the last process; until then nobody else may use the overlay.
tries=0
while [ "$tries" -lt 500 ] && [ "$(losetup -nO BACK-FILE "$device" 2>/dev/null)" = "$behind" ]; do
    sleep 0.02
    tries=$((tries + 1))
done
[ "$tries" -lt 500 ] || fail "the overlay is still in use: $overlay"
exit "$status"
END
      }

      template {
        destination = "local/confined.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# confined CAPABILITIES NAMES HOST COMMAND...: run a command, if this process is confined: it has other namespaces of these NAMES
# (as /proc/self/ns has them) than the HOST, no other capabilities than CAPABILITIES (a number, a bit each), a filter of system
# calls, cannot gain privileges, and cannot write to /proc/sys and the parts of /proc that control the host. It runs in the image,
# as the first program of a run.
fail() { echo "this run of the image is not confined: $1" >&2; exit 70; }
allowed=$1 names=$2 host=$3
shift 3
# shellcheck disable=SC2086 # a list of names
own=$(cd /proc/self/ns && stat -Lc %n=%i $names) || fail "its namespaces are not known"
for word in $own; do
    case " $host " in
        *" $word "*) fail "it is in the host's namespace: $${word%=*}" ;;
        *" $${word%=*}="[1-9]*) ;;
        *) fail "the namespaces of the host are not known" ;;
    esac
done
privileges='' filter='' bounds=''
while read -r key value; do
    case $key in
        CapInh: | CapPrm: | CapEff: | CapBnd: | CapAmb:)
            [ "$((0x$value & ~allowed))" = 0 ] || fail "$key $value"
            bounds=$bounds$key
            ;;
        NoNewPrivs:) privileges=$value ;;
        Seccomp:) filter=$value ;;
    esac
done </proc/self/status
case $bounds in *CapPrm:*CapBnd:*) ;; *) fail "its capabilities are not known" ;; esac
[ "$privileges" = 1 ] || fail "programs can gain privileges (no_new_privs)"
[ "$filter" = 2 ] || fail "system calls are not filtered (seccomp)"
mounts=' '
while read -r _ _ _ _ point options _; do
    case $point in /proc/*) mounts="$mounts$point=$options, " ;; esac
done </proc/self/mountinfo
# READ_ONLY, HIDDEN_FOLDERS and HIDDEN_FILES of appliance/plan/services/confinement.py
for path in /proc/sys /proc/acpi /proc/asound /proc/bus /proc/fs /proc/irq /proc/scsi /proc/sys/fs \
    /proc/kcore /proc/keys /proc/sched_debug /proc/sysrq-trigger /proc/timer_list; do
    # The last mount covers the others.
    case $${mounts##* "$path"=} in
        ro,*) ;;
        *) [ ! -e "$path" ] || fail "$path is the host's" ;;
    esac
done
exec "$@"
END
      }

      template {
        destination = "local/seccomp.json"
        perms       = "0444"
        change_mode = "noop"
        data        = "{\"comment\":\"What is not listed is answered with ENOSYS, because nobody traces: programs fall back to other calls.\",\"defaultAction\":\"SCMP_ACT_TRACE\",\"architectures\":[],\"syscalls\":[{\"names\":[\"accept\",\"accept4\",\"access\",\"adjtimex\",\"alarm\",\"arch_prctl\",\"bind\",\"brk\",\"cachestat\",\"capget\",\"capset\",\"chdir\",\"chmod\",\"chown\",\"chroot\",\"clock_adjtime\",\"clock_getres\",\"clock_gettime\",\"clock_nanosleep\",\"close\",\"close_range\",\"connect\",\"copy_file_range\",\"creat\",\"dup\",\"dup2\",\"dup3\",\"epoll_create\",\"epoll_create1\",\"epoll_ctl\",\"epoll_pwait\",\"epoll_pwait2\",\"epoll_wait\",\"eventfd\",\"eventfd2\",\"execve\",\"execveat\",\"exit\",\"exit_group\",\"faccessat\",\"faccessat2\",\"fadvise64\",\"fallocate\",\"fchdir\",\"fchmod\",\"fchmodat\",\"fchmodat2\",\"fchown\",\"fchownat\",\"fcntl\",\"fdatasync\",\"fgetxattr\",\"flistxattr\",\"flock\",\"fork\",\"fremovexattr\",\"fsetxattr\",\"fstat\",\"fstatfs\",\"fsync\",\"ftruncate\",\"futex\",\"futex_requeue\",\"futex_wait\",\"futex_waitv\",\"futex_wake\",\"futimesat\",\"get_mempolicy\",\"get_robust_list\",\"get_thread_area\",\"getcpu\",\"getcwd\",\"getdents\",\"getdents64\",\"getegid\",\"geteuid\",\"getgid\",\"getgroups\",\"getitimer\",\"getpeername\",\"getpgid\",\"getpgrp\",\"getpid\",\"getppid\",\"getpriority\",\"getrandom\",\"getresgid\",\"getresuid\",\"getrlimit\",\"getrusage\",\"getsid\",\"getsockname\",\"getsockopt\",\"gettid\",\"gettimeofday\",\"getuid\",\"getxattr\",\"getxattrat\",\"inotify_add_watch\",\"inotify_init\",\"inotify_init1\",\"inotify_rm_watch\",\"io_cancel\",\"io_destroy\",\"io_getevents\",\"io_pgetevents\",\"io_setup\",\"io_submit\",\"ioctl\",\"ioprio_get\",\"ioprio_set\",\"kill\",\"landlock_add_rule\",\"landlock_create_ruleset\",\"landlock_restrict_self\",\"lchown\",\"lgetxattr\",\"link\",\"linkat\",\"listen\",\"listmount\",\"listxattr\",\"listxattrat\",\"llistxattr\",\"lremovexattr\",\"lseek\",\"lsetxattr\",\"lsm_get_self_attr\",\"lsm_list_modules\",\"lsm_set_self_attr\",\"lstat\",\"madvise\",\"map_shadow_stack\",\"membarrier\",\"memfd_create\",\"memfd_secret\",\"mincore\",\"mkdir\",\"mkdirat\",\"mknod\",\"mknodat\",\"mlock\",\"mlock2\",\"mlockall\",\"mmap\",\"mprotect\",\"mq_getsetattr\",\"mq_notify\",\"mq_open\",\"mq_timedreceive\",\"mq_timedsend\",\"mq_unlink\",\"mremap\",\"mseal\",\"msgctl\",\"msgget\",\"msgrcv\",\"msgsnd\",\"msync\",\"munlock\",\"munlockall\",\"munmap\",\"name_to_handle_at\",\"nanosleep\",\"newfstatat\",\"open\",\"openat\",\"openat2\",\"pause\",\"pidfd_open\",\"pidfd_send_signal\",\"pipe\",\"pipe2\",\"pkey_alloc\",\"pkey_free\",\"pkey_mprotect\",\"poll\",\"ppoll\",\"prctl\",\"pread64\",\"preadv\",\"preadv2\",\"prlimit64\",\"process_mrelease\",\"pselect6\",\"pwrite64\",\"pwritev\",\"pwritev2\",\"read\",\"readahead\",\"readlink\",\"readlinkat\",\"readv\",\"recvfrom\",\"recvmmsg\",\"recvmsg\",\"removexattr\",\"removexattrat\",\"rename\",\"renameat\",\"renameat2\",\"restart_syscall\",\"rmdir\",\"rseq\",\"rt_sigaction\",\"rt_sigpending\",\"rt_sigprocmask\",\"rt_sigqueueinfo\",\"rt_sigreturn\",\"rt_sigsuspend\",\"rt_sigtimedwait\",\"rt_tgsigqueueinfo\",\"sched_get_priority_max\",\"sched_get_priority_min\",\"sched_getaffinity\",\"sched_getattr\",\"sched_getparam\",\"sched_getscheduler\",\"sched_rr_get_interval\",\"sched_setaffinity\",\"sched_setattr\",\"sched_setparam\",\"sched_setscheduler\",\"sched_yield\",\"seccomp\",\"select\",\"semctl\",\"semget\",\"semop\",\"semtimedop\",\"sendfile\",\"sendmmsg\",\"sendmsg\",\"sendto\",\"set_robust_list\",\"set_thread_area\",\"set_tid_address\",\"setfsgid\",\"setfsuid\",\"setgid\",\"setgroups\",\"setitimer\",\"setpgid\",\"setpriority\",\"setregid\",\"setresgid\",\"setresuid\",\"setreuid\",\"setrlimit\",\"setsid\",\"setsockopt\",\"setuid\",\"setxattr\",\"setxattrat\",\"shmat\",\"shmctl\",\"shmdt\",\"shmget\",\"shutdown\",\"sigaltstack\",\"signalfd\",\"signalfd4\",\"socketpair\",\"splice\",\"stat\",\"statfs\",\"statmount\",\"statx\",\"symlink\",\"symlinkat\",\"sync\",\"sync_file_range\",\"sync_file_range2\",\"syncfs\",\"sysinfo\",\"tee\",\"tgkill\",\"time\",\"timer_create\",\"timer_delete\",\"timer_getoverrun\",\"timer_gettime\",\"timer_settime\",\"timerfd_create\",\"timerfd_gettime\",\"timerfd_settime\",\"times\",\"tkill\",\"truncate\",\"umask\",\"uname\",\"unlink\",\"unlinkat\",\"utime\",\"utimensat\",\"utimes\",\"vfork\",\"vmsplice\",\"wait4\",\"waitid\",\"write\",\"writev\"],\"action\":\"SCMP_ACT_ALLOW\"},{\"comment\":\"processes and threads, without CLONE_NEW*\",\"names\":[\"clone\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060288,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"the same: slurmrestd leaves shared semaphores\",\"names\":[\"unshare\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060416,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"AF_UNIX\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":1,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET6\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":10,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_NETLINK\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":16,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_PACKET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":17,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"Linux\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":0,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"query\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":4294967295,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"file systems are mounted by the host only\",\"names\":[\"fsconfig\",\"fsmount\",\"fsopen\",\"fspick\",\"mount\",\"mount_setattr\",\"move_mount\",\"open_tree\",\"open_tree_attr\",\"pivot_root\",\"umount2\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"no other namespaces; clone3 is not listed: no filter can read its flags, and programs fall back to clone\",\"names\":[\"setns\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"the kernel and its configuration\",\"names\":[\"_sysctl\",\"acct\",\"bpf\",\"clock_settime\",\"create_module\",\"delete_module\",\"finit_module\",\"get_kernel_syms\",\"init_module\",\"ioperm\",\"iopl\",\"kexec_file_load\",\"kexec_load\",\"lookup_dcookie\",\"modify_ldt\",\"nfsservctl\",\"perf_event_open\",\"query_module\",\"quotactl\",\"quotactl_fd\",\"reboot\",\"setdomainname\",\"sethostname\",\"settimeofday\",\"swapoff\",\"swapon\",\"sysfs\",\"syslog\",\"uselib\",\"ustat\",\"vhangup\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"other processes: a tracer could also let calls pass that this filter answers\",\"names\":[\"kcmp\",\"pidfd_getfd\",\"process_madvise\",\"process_vm_readv\",\"process_vm_writev\",\"ptrace\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"kernel keys have no namespace\",\"names\":[\"add_key\",\"keyctl\",\"request_key\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"files by handle: past every folder of the host's file system\",\"names\":[\"open_by_handle_at\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"often the way into the kernel, and no daemon here needs them\",\"names\":[\"fanotify_init\",\"fanotify_mark\",\"io_uring_enter\",\"io_uring_register\",\"io_uring_setup\",\"remap_file_pages\",\"userfaultfd\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"placement of memory on the host's nodes\",\"names\":[\"mbind\",\"migrate_pages\",\"move_pages\",\"set_mempolicy\",\"set_mempolicy_home_node\"],\"action\":\"SCMP_ACT_ERRNO\"}]}\n"
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
          "${NOMAD_TASK_DIR}/empty",
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
          "--pid",
          "--no-init",
          "--ipc",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_AUDIT_WRITE,CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID,CAP_SYS_CHROOT",
          "--security",
          "seccomp:${NOMAD_TASK_DIR}/seccomp.json",
          "--no-mount",
          "sys",
          "--no-mount",
          "/etc/localtime",
          "--no-mount",
          "/etc/hosts",
          "--bind=/proc/sys:/proc/sys:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/acpi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/asound:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/bus:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/fs:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/irq:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/scsi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/sys/fs:ro",
          "--bind=/dev/null:/proc/kcore:ro",
          "--bind=/dev/null:/proc/keys:ro",
          "--bind=/dev/null:/proc/sched_debug:ro",
          "--bind=/dev/null:/proc/sysrq-trigger:ro",
          "--bind=/dev/null:/proc/timer_list:ro",
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
          "--bind",
          "${NOMAD_TASK_DIR}/confined.sh:/mnt/confined.sh:ro",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/bin/sh",
          "-eu",
          "/mnt/confined.sh",
          "537141739",
          "ipc mnt pid",
          "@HOST@",
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
    exec unshare --mount --propagation slave /bin/sh -eu "$NOMAD_TASK_DIR/run-image.sh" once '' '' '' apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/run-image.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# run-image KIND OVERLAY MODE IMAGE COMMAND...: run a command of Apptainer, in the mount namespace that unshare(1) has made for it.
# KIND is start, join or once. OVERLAY, if not empty: an overlay that nobody uses, whose files are data for the command: what a
# container with this IMAGE would see is a folder of this namespace, for the word @OVERLAY@; MODE is ro or rw.
# @HOST@ in COMMAND: the namespaces of this host, which definitions/scripts/confined compares. A mount over a part of /proc that
# this host lacks (--bind=PATH:/proc/...:ro) is left out.
#
# A program of Apptainer is the executable of the container's first process and, for a moment, of each that joins it: root in the
# container could change it by /proc/PID/exe, as the host's devices by their mounts. Here both are mounted read-only.
kind=$1 overlay=$2 mode=$3 image=$4
shift 4
fail() { echo "$1" >&2; exit 1; }
check_layers() {
    for layer in upper work; do # the kernel would follow a link, which a snapshot of elsewhere may have
        if [ -L "$place/data/$layer" ] || [ ! -d "$place/data/$layer" ]; then fail "$overlay has no folder /$layer"; fi
    done
}
# Where packages and builds have the starter.
found=
bin=$(readlink -f "$(command -v apptainer || echo /usr/bin/apptainer)")
for folder in /usr/lib/*-linux-gnu*/apptainer "$${bin%/bin/*}/libexec/apptainer" /usr/lib/apptainer /usr/libexec/apptainer; do
    [ ! -e "$folder/bin/starter" ] || found="$found $(readlink -f "$folder")"
done
[ -n "$found" ] || found=$(apptainer buildcfg LIBEXECDIR)/apptainer
for folder in $found; do
    mount -o bind,ro "$folder" "$folder"
done
mountpoint -q /dev || mount --rbind /dev /dev
mount -o remount,bind,ro /dev
# What was opened before is still on the host's own mount, and /proc/PID/fd leads to it.
# shellcheck disable=SC3013 # dash has it
[ ! /proc/self/fd/0 -ef /dev/null ] || exec </dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/1 -ef /dev/null ] || exec >/dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/2 -ef /dev/null ] || exec 2>/dev/null
if [ "$kind" = start ]; then
    # The output of the container's first process: bounded, and not on a disk of the host.
    logs=$${APPTAINER_CONFIGDIR:-~root/.apptainer}/instances/logs
    mkdir -p "$logs"
    mount -t tmpfs -o size=1m,nr_inodes=64,mode=700,nosuid,nodev,noexec sms-output "$logs"
fi
if [ -n "$overlay" ]; then
    place=/run/sms/overlay
    (umask 077; mkdir -p $place)
    mount -t tmpfs -o size=64k,mode=700,nosuid,nodev,noexec sms-overlay $place
    mkdir $place/image $place/data $place/files
    part=$(apptainer sif list "$image" | sed -n 's/^[0-9]* *|[^|]*|[^|]*|\([0-9]*-[0-9]*\) *|FS (Squashfs\/\*System.*/\1/p')
    case $part in '' | *[!0-9-]*) fail "$image has not one squashfs file system" ;; esac
    from=$${part%-*}
    # Not by mount(8): it refuses a file of which another loop device has a part, as that of an instance with this image.
    lower=$(losetup --find --show --read-only --offset "$from" --sizelimit $(($${part#*-} - from)) "$image")
    mount -t squashfs -o ro,nosuid,nodev "$lower" $place/image || { losetup --detach "$lower"; exit 1; }
    losetup --detach "$lower" # when it is unmounted
    if [ "$mode" = ro ]; then
        mount -t ext3 -o loop,ro,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/data/upper:$place/image
    else
        mount -t ext3 -o loop,noatime,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/image,upperdir=$place/data/upper,workdir=$place/data/work
    fi
    mount -t overlay -o "$mode,nosuid,nodev,$layers" sms-overlay $place/files
fi
# Of a process that stays: the kernel gives the number of a namespace that has ended to a new one.
stays=$PPID
[ -e "/proc/$stays/ns/mnt" ] || stays=1
host=
for word in $(cd "/proc/$stays/ns" && stat -Lc %n=%i ipc mnt net pid uts); do
    host="$host $word"
done
count=$#
while [ "$count" -gt 0 ]; do
    word=$1
    shift
    count=$((count - 1))
    case $word in
        @HOST@) word=$host ;;
        @OVERLAY@:*) word=$place/files:$${word#*:} ;;
        --bind=*:/proc/*:ro)
            path=$${word#*:}
            [ -e "$${path%:ro}" ] || continue
            ;;
    esac
    set -- "$@" "$word"
done
[ -n "$overlay" ] || exec "$@"
device=$(findmnt -no SOURCE "$place/data")
behind=$(losetup -nO BACK-FILE "$device")
status=0
"$@" || status=$?
umount "$place/files" "$place/data" "$place/image"
# The kernel ends the last mount a moment after the last process; until then nobody else may use the overlay.
tries=0
while [ "$tries" -lt 500 ] && [ "$(losetup -nO BACK-FILE "$device" 2>/dev/null)" = "$behind" ]; do
    sleep 0.02
    tries=$((tries + 1))
done
[ "$tries" -lt 500 ] || fail "the overlay is still in use: $overlay"
exit "$status"
END
      }

      template {
        destination = "local/confined.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# confined CAPABILITIES NAMES HOST COMMAND...: run a command, if this process is confined: it has other namespaces of these NAMES
# (as /proc/self/ns has them) than the HOST, no other capabilities than CAPABILITIES (a number, a bit each), a filter of system
# calls, cannot gain privileges, and cannot write to /proc/sys and the parts of /proc that control the host. It runs in the image,
# as the first program of a run.
fail() { echo "this run of the image is not confined: $1" >&2; exit 70; }
allowed=$1 names=$2 host=$3
shift 3
# shellcheck disable=SC2086 # a list of names
own=$(cd /proc/self/ns && stat -Lc %n=%i $names) || fail "its namespaces are not known"
for word in $own; do
    case " $host " in
        *" $word "*) fail "it is in the host's namespace: $${word%=*}" ;;
        *" $${word%=*}="[1-9]*) ;;
        *) fail "the namespaces of the host are not known" ;;
    esac
done
privileges='' filter='' bounds=''
while read -r key value; do
    case $key in
        CapInh: | CapPrm: | CapEff: | CapBnd: | CapAmb:)
            [ "$((0x$value & ~allowed))" = 0 ] || fail "$key $value"
            bounds=$bounds$key
            ;;
        NoNewPrivs:) privileges=$value ;;
        Seccomp:) filter=$value ;;
    esac
done </proc/self/status
case $bounds in *CapPrm:*CapBnd:*) ;; *) fail "its capabilities are not known" ;; esac
[ "$privileges" = 1 ] || fail "programs can gain privileges (no_new_privs)"
[ "$filter" = 2 ] || fail "system calls are not filtered (seccomp)"
mounts=' '
while read -r _ _ _ _ point options _; do
    case $point in /proc/*) mounts="$mounts$point=$options, " ;; esac
done </proc/self/mountinfo
# READ_ONLY, HIDDEN_FOLDERS and HIDDEN_FILES of appliance/plan/services/confinement.py
for path in /proc/sys /proc/acpi /proc/asound /proc/bus /proc/fs /proc/irq /proc/scsi /proc/sys/fs \
    /proc/kcore /proc/keys /proc/sched_debug /proc/sysrq-trigger /proc/timer_list; do
    # The last mount covers the others.
    case $${mounts##* "$path"=} in
        ro,*) ;;
        *) [ ! -e "$path" ] || fail "$path is the host's" ;;
    esac
done
exec "$@"
END
      }

      template {
        destination = "local/seccomp.json"
        perms       = "0444"
        change_mode = "noop"
        data        = "{\"comment\":\"What is not listed is answered with ENOSYS, because nobody traces: programs fall back to other calls.\",\"defaultAction\":\"SCMP_ACT_TRACE\",\"architectures\":[],\"syscalls\":[{\"names\":[\"accept\",\"accept4\",\"access\",\"adjtimex\",\"alarm\",\"arch_prctl\",\"bind\",\"brk\",\"cachestat\",\"capget\",\"capset\",\"chdir\",\"chmod\",\"chown\",\"chroot\",\"clock_adjtime\",\"clock_getres\",\"clock_gettime\",\"clock_nanosleep\",\"close\",\"close_range\",\"connect\",\"copy_file_range\",\"creat\",\"dup\",\"dup2\",\"dup3\",\"epoll_create\",\"epoll_create1\",\"epoll_ctl\",\"epoll_pwait\",\"epoll_pwait2\",\"epoll_wait\",\"eventfd\",\"eventfd2\",\"execve\",\"execveat\",\"exit\",\"exit_group\",\"faccessat\",\"faccessat2\",\"fadvise64\",\"fallocate\",\"fchdir\",\"fchmod\",\"fchmodat\",\"fchmodat2\",\"fchown\",\"fchownat\",\"fcntl\",\"fdatasync\",\"fgetxattr\",\"flistxattr\",\"flock\",\"fork\",\"fremovexattr\",\"fsetxattr\",\"fstat\",\"fstatfs\",\"fsync\",\"ftruncate\",\"futex\",\"futex_requeue\",\"futex_wait\",\"futex_waitv\",\"futex_wake\",\"futimesat\",\"get_mempolicy\",\"get_robust_list\",\"get_thread_area\",\"getcpu\",\"getcwd\",\"getdents\",\"getdents64\",\"getegid\",\"geteuid\",\"getgid\",\"getgroups\",\"getitimer\",\"getpeername\",\"getpgid\",\"getpgrp\",\"getpid\",\"getppid\",\"getpriority\",\"getrandom\",\"getresgid\",\"getresuid\",\"getrlimit\",\"getrusage\",\"getsid\",\"getsockname\",\"getsockopt\",\"gettid\",\"gettimeofday\",\"getuid\",\"getxattr\",\"getxattrat\",\"inotify_add_watch\",\"inotify_init\",\"inotify_init1\",\"inotify_rm_watch\",\"io_cancel\",\"io_destroy\",\"io_getevents\",\"io_pgetevents\",\"io_setup\",\"io_submit\",\"ioctl\",\"ioprio_get\",\"ioprio_set\",\"kill\",\"landlock_add_rule\",\"landlock_create_ruleset\",\"landlock_restrict_self\",\"lchown\",\"lgetxattr\",\"link\",\"linkat\",\"listen\",\"listmount\",\"listxattr\",\"listxattrat\",\"llistxattr\",\"lremovexattr\",\"lseek\",\"lsetxattr\",\"lsm_get_self_attr\",\"lsm_list_modules\",\"lsm_set_self_attr\",\"lstat\",\"madvise\",\"map_shadow_stack\",\"membarrier\",\"memfd_create\",\"memfd_secret\",\"mincore\",\"mkdir\",\"mkdirat\",\"mknod\",\"mknodat\",\"mlock\",\"mlock2\",\"mlockall\",\"mmap\",\"mprotect\",\"mq_getsetattr\",\"mq_notify\",\"mq_open\",\"mq_timedreceive\",\"mq_timedsend\",\"mq_unlink\",\"mremap\",\"mseal\",\"msgctl\",\"msgget\",\"msgrcv\",\"msgsnd\",\"msync\",\"munlock\",\"munlockall\",\"munmap\",\"name_to_handle_at\",\"nanosleep\",\"newfstatat\",\"open\",\"openat\",\"openat2\",\"pause\",\"pidfd_open\",\"pidfd_send_signal\",\"pipe\",\"pipe2\",\"pkey_alloc\",\"pkey_free\",\"pkey_mprotect\",\"poll\",\"ppoll\",\"prctl\",\"pread64\",\"preadv\",\"preadv2\",\"prlimit64\",\"process_mrelease\",\"pselect6\",\"pwrite64\",\"pwritev\",\"pwritev2\",\"read\",\"readahead\",\"readlink\",\"readlinkat\",\"readv\",\"recvfrom\",\"recvmmsg\",\"recvmsg\",\"removexattr\",\"removexattrat\",\"rename\",\"renameat\",\"renameat2\",\"restart_syscall\",\"rmdir\",\"rseq\",\"rt_sigaction\",\"rt_sigpending\",\"rt_sigprocmask\",\"rt_sigqueueinfo\",\"rt_sigreturn\",\"rt_sigsuspend\",\"rt_sigtimedwait\",\"rt_tgsigqueueinfo\",\"sched_get_priority_max\",\"sched_get_priority_min\",\"sched_getaffinity\",\"sched_getattr\",\"sched_getparam\",\"sched_getscheduler\",\"sched_rr_get_interval\",\"sched_setaffinity\",\"sched_setattr\",\"sched_setparam\",\"sched_setscheduler\",\"sched_yield\",\"seccomp\",\"select\",\"semctl\",\"semget\",\"semop\",\"semtimedop\",\"sendfile\",\"sendmmsg\",\"sendmsg\",\"sendto\",\"set_robust_list\",\"set_thread_area\",\"set_tid_address\",\"setfsgid\",\"setfsuid\",\"setgid\",\"setgroups\",\"setitimer\",\"setpgid\",\"setpriority\",\"setregid\",\"setresgid\",\"setresuid\",\"setreuid\",\"setrlimit\",\"setsid\",\"setsockopt\",\"setuid\",\"setxattr\",\"setxattrat\",\"shmat\",\"shmctl\",\"shmdt\",\"shmget\",\"shutdown\",\"sigaltstack\",\"signalfd\",\"signalfd4\",\"socketpair\",\"splice\",\"stat\",\"statfs\",\"statmount\",\"statx\",\"symlink\",\"symlinkat\",\"sync\",\"sync_file_range\",\"sync_file_range2\",\"syncfs\",\"sysinfo\",\"tee\",\"tgkill\",\"time\",\"timer_create\",\"timer_delete\",\"timer_getoverrun\",\"timer_gettime\",\"timer_settime\",\"timerfd_create\",\"timerfd_gettime\",\"timerfd_settime\",\"times\",\"tkill\",\"truncate\",\"umask\",\"uname\",\"unlink\",\"unlinkat\",\"utime\",\"utimensat\",\"utimes\",\"vfork\",\"vmsplice\",\"wait4\",\"waitid\",\"write\",\"writev\"],\"action\":\"SCMP_ACT_ALLOW\"},{\"comment\":\"processes and threads, without CLONE_NEW*\",\"names\":[\"clone\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060288,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"the same: slurmrestd leaves shared semaphores\",\"names\":[\"unshare\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060416,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"AF_UNIX\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":1,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET6\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":10,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_NETLINK\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":16,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_PACKET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":17,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"Linux\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":0,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"query\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":4294967295,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"file systems are mounted by the host only\",\"names\":[\"fsconfig\",\"fsmount\",\"fsopen\",\"fspick\",\"mount\",\"mount_setattr\",\"move_mount\",\"open_tree\",\"open_tree_attr\",\"pivot_root\",\"umount2\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"no other namespaces; clone3 is not listed: no filter can read its flags, and programs fall back to clone\",\"names\":[\"setns\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"the kernel and its configuration\",\"names\":[\"_sysctl\",\"acct\",\"bpf\",\"clock_settime\",\"create_module\",\"delete_module\",\"finit_module\",\"get_kernel_syms\",\"init_module\",\"ioperm\",\"iopl\",\"kexec_file_load\",\"kexec_load\",\"lookup_dcookie\",\"modify_ldt\",\"nfsservctl\",\"perf_event_open\",\"query_module\",\"quotactl\",\"quotactl_fd\",\"reboot\",\"setdomainname\",\"sethostname\",\"settimeofday\",\"swapoff\",\"swapon\",\"sysfs\",\"syslog\",\"uselib\",\"ustat\",\"vhangup\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"other processes: a tracer could also let calls pass that this filter answers\",\"names\":[\"kcmp\",\"pidfd_getfd\",\"process_madvise\",\"process_vm_readv\",\"process_vm_writev\",\"ptrace\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"kernel keys have no namespace\",\"names\":[\"add_key\",\"keyctl\",\"request_key\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"files by handle: past every folder of the host's file system\",\"names\":[\"open_by_handle_at\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"often the way into the kernel, and no daemon here needs them\",\"names\":[\"fanotify_init\",\"fanotify_mark\",\"io_uring_enter\",\"io_uring_register\",\"io_uring_setup\",\"remap_file_pages\",\"userfaultfd\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"placement of memory on the host's nodes\",\"names\":[\"mbind\",\"migrate_pages\",\"move_pages\",\"set_mempolicy\",\"set_mempolicy_home_node\"],\"action\":\"SCMP_ACT_ERRNO\"}]}\n"
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
          "${NOMAD_TASK_DIR}/empty",
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
          "--pid",
          "--no-init",
          "--ipc",
          "--dns",
          "172.30.2.53",
          "--no-privs",
          "--add-caps",
          "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_NET_RAW,CAP_SETGID,CAP_SETPCAP,CAP_SETUID",
          "--security",
          "seccomp:${NOMAD_TASK_DIR}/seccomp.json",
          "--no-mount",
          "sys",
          "--no-mount",
          "/etc/localtime",
          "--no-mount",
          "/etc/hosts",
          "--bind=/proc/sys:/proc/sys:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/acpi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/asound:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/bus:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/fs:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/irq:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/scsi:ro",
          "--bind=${NOMAD_TASK_DIR}/empty:/proc/sys/fs:ro",
          "--bind=/dev/null:/proc/kcore:ro",
          "--bind=/dev/null:/proc/keys:ro",
          "--bind=/dev/null:/proc/sched_debug:ro",
          "--bind=/dev/null:/proc/sysrq-trigger:ro",
          "--bind=/dev/null:/proc/timer_list:ro",
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
          "${NOMAD_TASK_DIR}/confined.sh:/mnt/confined.sh:ro",
          "/var/lib/sms/images/0123456789ab0000000000000000000000000000000000000000000000000000.sif",
          "/bin/sh",
          "-eu",
          "/mnt/confined.sh",
          "8683",
          "ipc mnt pid",
          "@HOST@",
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
    exec unshare --mount --propagation slave /bin/sh -eu "$NOMAD_TASK_DIR/run-image.sh" once '' '' '' apptainer exec "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
END
      }

      template {
        destination = "local/run-image.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# run-image KIND OVERLAY MODE IMAGE COMMAND...: run a command of Apptainer, in the mount namespace that unshare(1) has made for it.
# KIND is start, join or once. OVERLAY, if not empty: an overlay that nobody uses, whose files are data for the command: what a
# container with this IMAGE would see is a folder of this namespace, for the word @OVERLAY@; MODE is ro or rw.
# @HOST@ in COMMAND: the namespaces of this host, which definitions/scripts/confined compares. A mount over a part of /proc that
# this host lacks (--bind=PATH:/proc/...:ro) is left out.
#
# A program of Apptainer is the executable of the container's first process and, for a moment, of each that joins it: root in the
# container could change it by /proc/PID/exe, as the host's devices by their mounts. Here both are mounted read-only.
kind=$1 overlay=$2 mode=$3 image=$4
shift 4
fail() { echo "$1" >&2; exit 1; }
check_layers() {
    for layer in upper work; do # the kernel would follow a link, which a snapshot of elsewhere may have
        if [ -L "$place/data/$layer" ] || [ ! -d "$place/data/$layer" ]; then fail "$overlay has no folder /$layer"; fi
    done
}
# Where packages and builds have the starter.
found=
bin=$(readlink -f "$(command -v apptainer || echo /usr/bin/apptainer)")
for folder in /usr/lib/*-linux-gnu*/apptainer "$${bin%/bin/*}/libexec/apptainer" /usr/lib/apptainer /usr/libexec/apptainer; do
    [ ! -e "$folder/bin/starter" ] || found="$found $(readlink -f "$folder")"
done
[ -n "$found" ] || found=$(apptainer buildcfg LIBEXECDIR)/apptainer
for folder in $found; do
    mount -o bind,ro "$folder" "$folder"
done
mountpoint -q /dev || mount --rbind /dev /dev
mount -o remount,bind,ro /dev
# What was opened before is still on the host's own mount, and /proc/PID/fd leads to it.
# shellcheck disable=SC3013 # dash has it
[ ! /proc/self/fd/0 -ef /dev/null ] || exec </dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/1 -ef /dev/null ] || exec >/dev/null
# shellcheck disable=SC3013
[ ! /proc/self/fd/2 -ef /dev/null ] || exec 2>/dev/null
if [ "$kind" = start ]; then
    # The output of the container's first process: bounded, and not on a disk of the host.
    logs=$${APPTAINER_CONFIGDIR:-~root/.apptainer}/instances/logs
    mkdir -p "$logs"
    mount -t tmpfs -o size=1m,nr_inodes=64,mode=700,nosuid,nodev,noexec sms-output "$logs"
fi
if [ -n "$overlay" ]; then
    place=/run/sms/overlay
    (umask 077; mkdir -p $place)
    mount -t tmpfs -o size=64k,mode=700,nosuid,nodev,noexec sms-overlay $place
    mkdir $place/image $place/data $place/files
    part=$(apptainer sif list "$image" | sed -n 's/^[0-9]* *|[^|]*|[^|]*|\([0-9]*-[0-9]*\) *|FS (Squashfs\/\*System.*/\1/p')
    case $part in '' | *[!0-9-]*) fail "$image has not one squashfs file system" ;; esac
    from=$${part%-*}
    # Not by mount(8): it refuses a file of which another loop device has a part, as that of an instance with this image.
    lower=$(losetup --find --show --read-only --offset "$from" --sizelimit $(($${part#*-} - from)) "$image")
    mount -t squashfs -o ro,nosuid,nodev "$lower" $place/image || { losetup --detach "$lower"; exit 1; }
    losetup --detach "$lower" # when it is unmounted
    if [ "$mode" = ro ]; then
        mount -t ext3 -o loop,ro,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/data/upper:$place/image
    else
        mount -t ext3 -o loop,noatime,nosuid,nodev,errors=remount-ro "$overlay" $place/data
        check_layers
        layers=lowerdir=$place/image,upperdir=$place/data/upper,workdir=$place/data/work
    fi
    mount -t overlay -o "$mode,nosuid,nodev,$layers" sms-overlay $place/files
fi
# Of a process that stays: the kernel gives the number of a namespace that has ended to a new one.
stays=$PPID
[ -e "/proc/$stays/ns/mnt" ] || stays=1
host=
for word in $(cd "/proc/$stays/ns" && stat -Lc %n=%i ipc mnt net pid uts); do
    host="$host $word"
done
count=$#
while [ "$count" -gt 0 ]; do
    word=$1
    shift
    count=$((count - 1))
    case $word in
        @HOST@) word=$host ;;
        @OVERLAY@:*) word=$place/files:$${word#*:} ;;
        --bind=*:/proc/*:ro)
            path=$${word#*:}
            [ -e "$${path%:ro}" ] || continue
            ;;
    esac
    set -- "$@" "$word"
done
[ -n "$overlay" ] || exec "$@"
device=$(findmnt -no SOURCE "$place/data")
behind=$(losetup -nO BACK-FILE "$device")
status=0
"$@" || status=$?
umount "$place/files" "$place/data" "$place/image"
# The kernel ends the last mount a moment after the last process; until then nobody else may use the overlay.
tries=0
while [ "$tries" -lt 500 ] && [ "$(losetup -nO BACK-FILE "$device" 2>/dev/null)" = "$behind" ]; do
    sleep 0.02
    tries=$((tries + 1))
done
[ "$tries" -lt 500 ] || fail "the overlay is still in use: $overlay"
exit "$status"
END
      }

      template {
        destination = "local/confined.sh"
        perms       = "0444"
        change_mode = "noop"
        data = <<END
#!/bin/sh
# confined CAPABILITIES NAMES HOST COMMAND...: run a command, if this process is confined: it has other namespaces of these NAMES
# (as /proc/self/ns has them) than the HOST, no other capabilities than CAPABILITIES (a number, a bit each), a filter of system
# calls, cannot gain privileges, and cannot write to /proc/sys and the parts of /proc that control the host. It runs in the image,
# as the first program of a run.
fail() { echo "this run of the image is not confined: $1" >&2; exit 70; }
allowed=$1 names=$2 host=$3
shift 3
# shellcheck disable=SC2086 # a list of names
own=$(cd /proc/self/ns && stat -Lc %n=%i $names) || fail "its namespaces are not known"
for word in $own; do
    case " $host " in
        *" $word "*) fail "it is in the host's namespace: $${word%=*}" ;;
        *" $${word%=*}="[1-9]*) ;;
        *) fail "the namespaces of the host are not known" ;;
    esac
done
privileges='' filter='' bounds=''
while read -r key value; do
    case $key in
        CapInh: | CapPrm: | CapEff: | CapBnd: | CapAmb:)
            [ "$((0x$value & ~allowed))" = 0 ] || fail "$key $value"
            bounds=$bounds$key
            ;;
        NoNewPrivs:) privileges=$value ;;
        Seccomp:) filter=$value ;;
    esac
done </proc/self/status
case $bounds in *CapPrm:*CapBnd:*) ;; *) fail "its capabilities are not known" ;; esac
[ "$privileges" = 1 ] || fail "programs can gain privileges (no_new_privs)"
[ "$filter" = 2 ] || fail "system calls are not filtered (seccomp)"
mounts=' '
while read -r _ _ _ _ point options _; do
    case $point in /proc/*) mounts="$mounts$point=$options, " ;; esac
done </proc/self/mountinfo
# READ_ONLY, HIDDEN_FOLDERS and HIDDEN_FILES of appliance/plan/services/confinement.py
for path in /proc/sys /proc/acpi /proc/asound /proc/bus /proc/fs /proc/irq /proc/scsi /proc/sys/fs \
    /proc/kcore /proc/keys /proc/sched_debug /proc/sysrq-trigger /proc/timer_list; do
    # The last mount covers the others.
    case $${mounts##* "$path"=} in
        ro,*) ;;
        *) [ ! -e "$path" ] || fail "$path is the host's" ;;
    esac
done
exec "$@"
END
      }

      template {
        destination = "local/seccomp.json"
        perms       = "0444"
        change_mode = "noop"
        data        = "{\"comment\":\"What is not listed is answered with ENOSYS, because nobody traces: programs fall back to other calls.\",\"defaultAction\":\"SCMP_ACT_TRACE\",\"architectures\":[],\"syscalls\":[{\"names\":[\"accept\",\"accept4\",\"access\",\"adjtimex\",\"alarm\",\"arch_prctl\",\"bind\",\"brk\",\"cachestat\",\"capget\",\"capset\",\"chdir\",\"chmod\",\"chown\",\"chroot\",\"clock_adjtime\",\"clock_getres\",\"clock_gettime\",\"clock_nanosleep\",\"close\",\"close_range\",\"connect\",\"copy_file_range\",\"creat\",\"dup\",\"dup2\",\"dup3\",\"epoll_create\",\"epoll_create1\",\"epoll_ctl\",\"epoll_pwait\",\"epoll_pwait2\",\"epoll_wait\",\"eventfd\",\"eventfd2\",\"execve\",\"execveat\",\"exit\",\"exit_group\",\"faccessat\",\"faccessat2\",\"fadvise64\",\"fallocate\",\"fchdir\",\"fchmod\",\"fchmodat\",\"fchmodat2\",\"fchown\",\"fchownat\",\"fcntl\",\"fdatasync\",\"fgetxattr\",\"flistxattr\",\"flock\",\"fork\",\"fremovexattr\",\"fsetxattr\",\"fstat\",\"fstatfs\",\"fsync\",\"ftruncate\",\"futex\",\"futex_requeue\",\"futex_wait\",\"futex_waitv\",\"futex_wake\",\"futimesat\",\"get_mempolicy\",\"get_robust_list\",\"get_thread_area\",\"getcpu\",\"getcwd\",\"getdents\",\"getdents64\",\"getegid\",\"geteuid\",\"getgid\",\"getgroups\",\"getitimer\",\"getpeername\",\"getpgid\",\"getpgrp\",\"getpid\",\"getppid\",\"getpriority\",\"getrandom\",\"getresgid\",\"getresuid\",\"getrlimit\",\"getrusage\",\"getsid\",\"getsockname\",\"getsockopt\",\"gettid\",\"gettimeofday\",\"getuid\",\"getxattr\",\"getxattrat\",\"inotify_add_watch\",\"inotify_init\",\"inotify_init1\",\"inotify_rm_watch\",\"io_cancel\",\"io_destroy\",\"io_getevents\",\"io_pgetevents\",\"io_setup\",\"io_submit\",\"ioctl\",\"ioprio_get\",\"ioprio_set\",\"kill\",\"landlock_add_rule\",\"landlock_create_ruleset\",\"landlock_restrict_self\",\"lchown\",\"lgetxattr\",\"link\",\"linkat\",\"listen\",\"listmount\",\"listxattr\",\"listxattrat\",\"llistxattr\",\"lremovexattr\",\"lseek\",\"lsetxattr\",\"lsm_get_self_attr\",\"lsm_list_modules\",\"lsm_set_self_attr\",\"lstat\",\"madvise\",\"map_shadow_stack\",\"membarrier\",\"memfd_create\",\"memfd_secret\",\"mincore\",\"mkdir\",\"mkdirat\",\"mknod\",\"mknodat\",\"mlock\",\"mlock2\",\"mlockall\",\"mmap\",\"mprotect\",\"mq_getsetattr\",\"mq_notify\",\"mq_open\",\"mq_timedreceive\",\"mq_timedsend\",\"mq_unlink\",\"mremap\",\"mseal\",\"msgctl\",\"msgget\",\"msgrcv\",\"msgsnd\",\"msync\",\"munlock\",\"munlockall\",\"munmap\",\"name_to_handle_at\",\"nanosleep\",\"newfstatat\",\"open\",\"openat\",\"openat2\",\"pause\",\"pidfd_open\",\"pidfd_send_signal\",\"pipe\",\"pipe2\",\"pkey_alloc\",\"pkey_free\",\"pkey_mprotect\",\"poll\",\"ppoll\",\"prctl\",\"pread64\",\"preadv\",\"preadv2\",\"prlimit64\",\"process_mrelease\",\"pselect6\",\"pwrite64\",\"pwritev\",\"pwritev2\",\"read\",\"readahead\",\"readlink\",\"readlinkat\",\"readv\",\"recvfrom\",\"recvmmsg\",\"recvmsg\",\"removexattr\",\"removexattrat\",\"rename\",\"renameat\",\"renameat2\",\"restart_syscall\",\"rmdir\",\"rseq\",\"rt_sigaction\",\"rt_sigpending\",\"rt_sigprocmask\",\"rt_sigqueueinfo\",\"rt_sigreturn\",\"rt_sigsuspend\",\"rt_sigtimedwait\",\"rt_tgsigqueueinfo\",\"sched_get_priority_max\",\"sched_get_priority_min\",\"sched_getaffinity\",\"sched_getattr\",\"sched_getparam\",\"sched_getscheduler\",\"sched_rr_get_interval\",\"sched_setaffinity\",\"sched_setattr\",\"sched_setparam\",\"sched_setscheduler\",\"sched_yield\",\"seccomp\",\"select\",\"semctl\",\"semget\",\"semop\",\"semtimedop\",\"sendfile\",\"sendmmsg\",\"sendmsg\",\"sendto\",\"set_robust_list\",\"set_thread_area\",\"set_tid_address\",\"setfsgid\",\"setfsuid\",\"setgid\",\"setgroups\",\"setitimer\",\"setpgid\",\"setpriority\",\"setregid\",\"setresgid\",\"setresuid\",\"setreuid\",\"setrlimit\",\"setsid\",\"setsockopt\",\"setuid\",\"setxattr\",\"setxattrat\",\"shmat\",\"shmctl\",\"shmdt\",\"shmget\",\"shutdown\",\"sigaltstack\",\"signalfd\",\"signalfd4\",\"socketpair\",\"splice\",\"stat\",\"statfs\",\"statmount\",\"statx\",\"symlink\",\"symlinkat\",\"sync\",\"sync_file_range\",\"sync_file_range2\",\"syncfs\",\"sysinfo\",\"tee\",\"tgkill\",\"time\",\"timer_create\",\"timer_delete\",\"timer_getoverrun\",\"timer_gettime\",\"timer_settime\",\"timerfd_create\",\"timerfd_gettime\",\"timerfd_settime\",\"times\",\"tkill\",\"truncate\",\"umask\",\"uname\",\"unlink\",\"unlinkat\",\"utime\",\"utimensat\",\"utimes\",\"vfork\",\"vmsplice\",\"wait4\",\"waitid\",\"write\",\"writev\"],\"action\":\"SCMP_ACT_ALLOW\"},{\"comment\":\"processes and threads, without CLONE_NEW*\",\"names\":[\"clone\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060288,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"the same: slurmrestd leaves shared semaphores\",\"names\":[\"unshare\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2114060416,\"valueTwo\":0,\"op\":\"SCMP_CMP_MASKED_EQ\"}]},{\"comment\":\"AF_UNIX\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":1,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":2,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_INET6\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":10,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_NETLINK\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":16,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"AF_PACKET\",\"names\":[\"socket\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":17,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"Linux\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":0,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"query\",\"names\":[\"personality\"],\"action\":\"SCMP_ACT_ALLOW\",\"args\":[{\"index\":0,\"value\":4294967295,\"op\":\"SCMP_CMP_EQ\"}]},{\"comment\":\"file systems are mounted by the host only\",\"names\":[\"fsconfig\",\"fsmount\",\"fsopen\",\"fspick\",\"mount\",\"mount_setattr\",\"move_mount\",\"open_tree\",\"open_tree_attr\",\"pivot_root\",\"umount2\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"no other namespaces; clone3 is not listed: no filter can read its flags, and programs fall back to clone\",\"names\":[\"setns\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"the kernel and its configuration\",\"names\":[\"_sysctl\",\"acct\",\"bpf\",\"clock_settime\",\"create_module\",\"delete_module\",\"finit_module\",\"get_kernel_syms\",\"init_module\",\"ioperm\",\"iopl\",\"kexec_file_load\",\"kexec_load\",\"lookup_dcookie\",\"modify_ldt\",\"nfsservctl\",\"perf_event_open\",\"query_module\",\"quotactl\",\"quotactl_fd\",\"reboot\",\"setdomainname\",\"sethostname\",\"settimeofday\",\"swapoff\",\"swapon\",\"sysfs\",\"syslog\",\"uselib\",\"ustat\",\"vhangup\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"other processes: a tracer could also let calls pass that this filter answers\",\"names\":[\"kcmp\",\"pidfd_getfd\",\"process_madvise\",\"process_vm_readv\",\"process_vm_writev\",\"ptrace\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"kernel keys have no namespace\",\"names\":[\"add_key\",\"keyctl\",\"request_key\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"files by handle: past every folder of the host's file system\",\"names\":[\"open_by_handle_at\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"often the way into the kernel, and no daemon here needs them\",\"names\":[\"fanotify_init\",\"fanotify_mark\",\"io_uring_enter\",\"io_uring_register\",\"io_uring_setup\",\"remap_file_pages\",\"userfaultfd\"],\"action\":\"SCMP_ACT_ERRNO\"},{\"comment\":\"placement of memory on the host's nodes\",\"names\":[\"mbind\",\"migrate_pages\",\"move_pages\",\"set_mempolicy\",\"set_mempolicy_home_node\"],\"action\":\"SCMP_ACT_ERRNO\"}]}\n"
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
