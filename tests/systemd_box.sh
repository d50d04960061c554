# Boot systemd as process 1 of namespaces of its own. tests/systemd_box.py runs this file below unshare(1).
#
# The box is made so that systemd cannot change the machine, whatever its units say. A systemd that sees the machine's own
# /tmp and /dev empties the one, because of systemd-tmpfiles, and changes the other, because of udev. So the root is a
# tmpfs, every file of the machine in it is mounted read-only, and the devices are nodes of a tmpfs. The only units are
# those in $BOX_UNITS and those that a test writes. Before systemd starts, the mounts are checked. A mount that could
# change the machine ends this script.
#
#   BOX_ROOT      an empty directory, over which the box's root is mounted
#   BOX_UNITS     directory with all units (read-only in the box, as /units)
#   BOX_READABLE  directories of the machine that are visible under their own names, read-only; separated by colons
set -euo pipefail

[ $$ = 1 ] # the namespaces are our own
root=$BOX_ROOT
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"

see() { # show a directory of the machine read-only
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro,nodev "$root$2"
}
see /usr /usr
for name in bin sbin lib lib64; do
    if [ -L "/$name" ]; then ln -s "usr/$name" "$root/$name"; else see "/$name" "/$name"; fi
done
IFS=: read -ra readable <<<"$BOX_READABLE"
for path in "${readable[@]}"; do see "$path" "$path"; done
see "$BOX_UNITS" /units
# What the machine's own systemd would do at its start is not there at all.
for path in /usr/lib/systemd/system-generators /usr/lib/systemd/user-generators /usr/lib/tmpfiles.d /usr/lib/sysctl.d \
    /usr/lib/udev /usr/lib/systemd/system-environment-generators /usr/lib/systemd/user-environment-generators; do
    if [ -d "$path" ]; then mount -t tmpfs -o ro tmpfs "$root$path"; fi
done

mkdir -p "$root"/{etc/systemd/system,proc,sys,dev,run,tmp,var/lib,var/tmp,home/ann,root,old}
chmod 1777 "$root/tmp" "$root/var/tmp"
printf 'root:x:0:0::/root:/bin/sh\nann:x:990:990::/home/ann:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n' >"$root/etc/passwd"
printf 'root:x:0:\nann:x:990:\nnogroup:x:65534:\n' >"$root/etc/group"
printf 'passwd: files\ngroup: files\nhosts: files\n' >"$root/etc/nsswitch.conf"
printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
printf '%032x\n' 1 >"$root/etc/machine-id"
if [ -f /etc/ld.so.cache ]; then cp /etc/ld.so.cache "$root/etc/"; fi
chown 990:990 "$root/home/ann"

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
if [ -e "$root/proc/sysrq-trigger" ]; then
    mount --bind "$root/proc/sysrq-trigger" "$root/proc/sysrq-trigger"
    mount -o remount,bind,ro "$root/proc/sysrq-trigger"
fi
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
while read -r name major minor; do mknod -m 666 "$root/dev/$name" c "$major" "$minor"; done <<'NODES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
NODES
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"

cd "$root"
pivot_root . old
umount -l /old
rmdir /old

# Every file system of the machine has to be read-only here.
while read -r _ _ _ _ target options rest; do
    kind=${rest#*- }
    case ${kind%% *} in
    tmpfs | proc | sysfs | cgroup2 | devpts) ;;
    *) [[ ,$options, == *,ro,* ]] || { echo "the box is not closed: $target ($kind) is writable" >&2; exit 1; } ;;
    esac
done </proc/self/mountinfo
if touch /usr/systemd-box 2>/dev/null || [ "$(stat -fc %T /tmp)" != tmpfs ]; then
    echo "the box is not closed" >&2
    exit 1
fi
if [ "${BOX_ONLY_CHECK:-}" ]; then cat /proc/self/mountinfo; exit 0; fi

exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/etc/systemd/system:/units \
    setpriv --bounding-set=-sys_boot,-sys_module,-sys_time,-sys_rawio,-syslog,-mac_admin \
    /lib/systemd/systemd --system --unit=box.target --show-status=no
