#!/bin/sh
# First process of sms-old in namespaces of its own: makes its root file system and enters it.
# All mounts made here are visible to this host only and end with it.
set -eu
lab=/run/sms-lab/t-lab/sms-old
hostname sms-old
mount -t tmpfs -o mode=755 tmpfs "$lab/mnt"
root="$lab/mnt/root"
# Its changes outlive its power, and are not flushed: when this machine's own power fails, the lab ends anyway. The kernel
# refuses such a layer after an unclean end, which it marks in the work folder.
rm -rf /var/lib/sms-lab/t-lab/sms-old/work
mkdir -p /var/lib/sms-lab/t-lab/sms-old/upper /var/lib/sms-lab/t-lab/sms-old/work "$root"
mount -t overlay -o lowerdir=/cache/root,upperdir=/var/lib/sms-lab/t-lab/sms-old/upper,workdir=/var/lib/sms-lab/t-lab/sms-old/work,volatile overlay "$root"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# A sysfs of its own shows this host's interfaces; slurmd and Apptainer need the cgroups in it.
mount -t sysfs sysfs "$root/sys"
# systemd gets a cgroup of its own, which is the root of all that it sees.
mkdir "$lab/mnt/cgroup"
mount -t cgroup2 cgroup2 "$lab/mnt/cgroup"
cgroup="$lab/mnt/cgroup/"sms-lab-t-lab-sms-old
# The one of before its power was off has others in it: then it takes no process itself.
until [ ! -d "$cgroup" ] || find "$cgroup" -depth -type d -exec rmdir {} +; do sleep 0.1; done
mkdir "$cgroup"
echo 0 >"$cgroup/cgroup.procs"
# A /dev of its own: syslog daemons put their socket there.
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mkdir -p "$root"/home
mount --bind /var/lib/sms-lab/t-lab/home "$root"/home
tar -xf "$lab/files.tar" -C "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
exec /bin/sh /lab/setup.sh
