#!/usr/bin/env bash
# The server as a background process group: start waits until it is ready, stop leaves nothing behind.
#   server/server.sh start [flags of python -m server] | stop | status
# State lies in $DEEPINFER_RUN_DIR (default .run in the project): server.pid and server.log.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
run_dir=$(realpath -m -- "${DEEPINFER_RUN_DIR:-$root/.run}")
pid_file=$run_dir/server.pid
log_file=$run_dir/server.log
python=${DEEPINFER_PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
# A first start may convert the demo model or read a large checkpoint.
start_timeout_s=${DEEPINFER_START_TIMEOUT:-3600}
# Longer than the server's own --shutdown-timeout default and the ranks' grace together.
stop_timeout_s=${DEEPINFER_STOP_TIMEOUT:-60}

# The pid of our running server, or nothing: a number in a stale file may be somebody else's process by now.
running_pid() {
    local pid argv=()
    pid=$(cat -- "$pid_file" 2>/dev/null) || return 0
    [[ $pid =~ ^[0-9]+$ ]] || return 0
    { mapfile -d '' -t argv <"/proc/$pid/cmdline"; } 2>/dev/null || return 0
    if [[ ${argv[1]:-} == -m && ${argv[2]:-} == server ]]; then echo "$pid"; fi
}

start() {
    local pid
    mkdir -p -- "$run_dir"
    # One start at a time: two would both find nothing running. The server must not inherit the lock.
    exec 9>"$run_dir/lock"
    if ! flock -n 9; then
        echo "another start is under way in $run_dir" >&2
        return 1
    fi
    pid=$(running_pid)
    if [[ -n $pid ]]; then
        echo "already running as process $pid; stop it first" >&2
        return 1
    fi
    : >"$log_file"
    # A session of its own: closing this terminal does not end it.
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} setsid "$python" -m server "$@" >>"$log_file" 2>&1 </dev/null 9>&- &
    pid=$!
    if ! echo "$pid" >"$pid_file"; then
        kill -KILL "$pid" # nobody could stop it later
        return 1
    fi
    wait_ready "$pid"
}

wait_ready() {
    local pid=$1 deadline=$((SECONDS + start_timeout_s))
    until grep -q '^ready: ' "$log_file"; do
        if ! kill -0 "$pid" 2>/dev/null; then
            rm -f -- "$pid_file"
            fail "the server ended during start; the end of $log_file:"
        elif ((SECONDS >= deadline)); then
            end "$pid"
            fail "the server was not ready within $start_timeout_s s; the end of $log_file:"
        fi
        sleep 0.2
    done
    grep -A1 '^ready: ' "$log_file"
}

fail() {
    echo "$1" >&2
    tail -n 20 -- "$log_file" >&2
    exit 1
}

stop() {
    local pid
    pid=$(running_pid)
    if [[ -z $pid ]]; then
        echo "not running"
        rm -f -- "$pid_file"
        return 0
    fi
    end "$pid"
    echo "stopped"
}

# Ends a server that we know by its pid, also one so young that it is not yet what `running_pid` looks for.
end() {
    local pid=$1 groups deadline=$((SECONDS + stop_timeout_s))
    # Each rank leads a process group. The server ends them all, but one that has to be killed cannot.
    read -ra groups < <(cat "/proc/$pid/task/"*/children 2>/dev/null | tr '\n' ' ') || true
    kill -TERM "$pid" 2>/dev/null || true
    while lives "$pid" && ((SECONDS < deadline)); do sleep 0.1; done
    for group in "$pid" "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
    rm -f -- "$pid_file"
}

# Not `kill -0`, which also finds a zombie: nobody may be there to collect it, as in most containers.
lives() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) && [[ ${stat##*) } != Z* ]]
}

status() {
    local pid
    pid=$(running_pid)
    if [[ -z $pid ]]; then
        echo "not running"
        return 3
    fi
    echo "running as process $pid, log in $log_file"
    grep -A1 '^ready: ' "$log_file" || echo "not ready yet"
}

case ${1:-} in
start) shift && start "$@" ;;
stop) stop ;;
status) status ;;
*)
    echo "usage: $0 start [flags] | stop | status" >&2
    exit 2
    ;;
esac
