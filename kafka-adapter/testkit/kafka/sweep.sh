# Removes the directory $1 at the end of standard input, which comes at the latest when the process which holds the
# other end is gone. The brokers die at the same moment and may still write: hence several attempts.
while read -r _; do :; done
attempt=0
while [ -e "$1" ] && [ "$attempt" -lt 100 ]; do
    rm -rf -- "$1" 2>/dev/null && break
    attempt=$((attempt + 1))
    sleep 0.1
done
