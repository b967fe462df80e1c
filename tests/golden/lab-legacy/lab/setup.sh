#!/bin/sh
# What sms-old does inside its new root before its daemons start.
set -eu
cd /
umount -l /.old
rmdir /.old
echo 1 >/proc/sys/net/ipv4/ip_forward
mkdir -p /run/sshd /run/lock /var/log/lab
systemctl --root=/ --quiet enable networking nftables
systemctl --root=/ --quiet mask fstrim.timer e2scrub_all.timer e2scrub_reap.service systemd-pstore.service nfs-client.target nfs-ganesha-lock.service rpcbind.service rpcbind.socket apt-daily.timer apt-daily-upgrade.timer getty@tty1.service console-getty.service
chown mysql: /etc/mysql/slurm.sql
chown slurm: /etc/slurm/slurmdbd.conf
chown munge: /etc/munge/munge.key
install -d -o slurm -g slurm /var/log/slurm
ip link set lo up
newaliases
id -u alice >/dev/null 2>&1 || {
printf '%s\n' alice:x:2000:2000:Alice:/home/alice:/bin/bash >>/etc/passwd
printf '%s\n' alice:x:2000: >>/etc/group
printf '%s\n' 'alice:*:20000:0:99999:7:::' >>/etc/shadow
}
install -d -o 2000 -g 2000 /home/alice
# As in any container: settings of the kernel are read-only, but for those of its own network.
mount --bind /proc/sys /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,ro /proc/sys
echo entered
# The log is in the old root: close it.
exec unshare --cgroup sh /lab/systemd.sh </dev/null >/dev/null 2>&1
