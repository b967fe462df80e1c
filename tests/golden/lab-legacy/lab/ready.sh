#!/bin/bash
# ready.sh SECONDS: waits until every daemon answers; else names those that do not.
# off UNIT: whether systemd was to start it, and a condition of it was not met
off() {
    state=$(systemctl show --property=ActiveState,ConditionResult,ConditionTimestampMonotonic "$1")
    grep -qx ActiveState=inactive <<<"$state" && grep -qx ConditionResult=no <<<"$state" &&
        ! grep -qx ConditionTimestampMonotonic=0 <<<"$state"
}
end=$((SECONDS + ${1:-0}))
while :; do
    missing=
    { off munge || { munge -n; }; } >/dev/null 2>&1 </dev/null || missing+=" munge"
    { off mariadb || { mariadb-admin ping; }; } >/dev/null 2>&1 </dev/null || missing+=" mariadb"
    { off slurmdbd || { sacctmgr -nP list cluster format=cluster,controlport | grep -q '|6817$'; }; } >/dev/null 2>&1 </dev/null || missing+=" slurmdbd"
    { off slurmctld || { scontrol ping | grep -q 'is UP'; }; } >/dev/null 2>&1 </dev/null || missing+=" slurmctld"
    { off nftables || { nft list table ip nat; }; } >/dev/null 2>&1 </dev/null || missing+=" nftables"
    { off rsyslog || { ss -Hltn sport = :514 | grep -q .; }; } >/dev/null 2>&1 </dev/null || missing+=" rsyslog"
    { off chrony || { [ -S /run/chrony/chronyd.sock ]; }; } >/dev/null 2>&1 </dev/null || missing+=" chrony"
    { off postfix || { [ -S /var/spool/postfix/public/pickup ]; }; } >/dev/null 2>&1 </dev/null || missing+=" postfix"
    { off dnsmasq || { ss -Hltn sport = :53 | grep -q .; }; } >/dev/null 2>&1 </dev/null || missing+=" dnsmasq"
    { off nfs-ganesha || { ss -Hltn sport = :2049 | grep -q .; }; } >/dev/null 2>&1 </dev/null || missing+=" nfs-ganesha"
    { off cron || { systemctl is-active cron; }; } >/dev/null 2>&1 </dev/null || missing+=" cron"
    { off ssh || { ss -Hltn sport = :22 | grep -q .; }; } >/dev/null 2>&1 </dev/null || missing+=" ssh"
    [ -z "$missing" ] && exit 0
    [ $SECONDS -ge $end ] && { echo "${missing# }"; exit 1; }
    sleep 0.1
done
