# Runs one JVM: supervise.sh LOG COMMAND...
# Reads signal names from standard input, one a line, sends each to the JVM and answers "sent" or "gone". At the end
# of the input, which comes at the latest when the process which holds the other end is gone, however it ended, the
# JVM is killed. Prints the JVM's process id first, and exits with the JVM's status.
exec 3<&0 </dev/null
log=$1
shift
"$@" 3<&- >>"$log" 2>&1 &
jvm=$!
echo "$jvm"
(
    while read -r signal <&3; do
        if kill -s "$signal" "$jvm"; then echo sent; else echo gone; fi
    done
    kill -s KILL "$jvm"
) 2>/dev/null &
signaller=$!
wait "$jvm"
status=$?
kill "$signaller" 2>/dev/null
exit "$status"
