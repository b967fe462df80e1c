#!/bin/sh
# The first process of sms-old, in a cgroup namespace of its own, becomes systemd.
set -eu
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i container=sms-lab LC_ALL=C.UTF-8 PATH="$PATH" /lib/systemd/systemd
