//! Tests of stock Debian guests on a real rack, inside an emulated host with nested paging. The
//! contents of a pool node must survive restarts of the agent and the manager. A revoked slice must
//! end only its own guest.

use tests::{
    linux_guests::{add_guest, artifacts, create_host, run_host, words_after},
    rack::programs_dir,
};

/// Shell script that starts a manager and one agent, and defines functions to restart both and to
/// run guests.
const RACK_SCRIPT: &str = r#"
mkdir -p /run/emc /run/h0
mount -t tmpfs -o size=700m emc /run/emc
cat > /run/rack.toml <<END
[manager]
listen = "unix:/run/manager.sock"
store = "/run/store"
[lease]
ttl_s = 5
fence_after_s = "never"
[[emc]]
name = "emc0"
slices = 3
driver = "emulated"
path = "/run/emc/emc0"
[[host]]
name = "h0"
cores = 8
local_mib = 4096
emcs = ["emc0"]
END
cat > /run/h0.toml <<END
[agent]
host = "h0"
manager = "unix:/run/manager.sock"
runtime_dir = "/run/h0"
token_file = "/run/store/tokens/h0.token"
[backend]
kind = "emulated"
END
export TARN_ENDPOINT=unix:/run/manager.sock TARN_VMM_RUN_DIR=/run/vmm TARN_HOST_MEMORY=/run/h0/host-memory.sock
manager() { pool-manager serve --config /run/rack.toml > /run/manager.log 2>&1 & MANAGER=$!; }
agent() { host-agent serve --config /run/h0.toml > /run/agent.log 2>&1 & AGENT=$!; }
# Waits until a command succeeds, for ten minutes at most: guests of an emulated host start slowly on a busy machine.
wait_for() {
  n=0
  until "$@" > /dev/null 2>&1; do
    n=$((n+1)); [ $n -gt 3000 ] && { echo "WAIT-TIMEOUT $*"; tail -n 20 /run/*.log /run/*.console; poweroff -f; }
    sleep 0.2
  done
}
down() { ! up; }
up() { tarn get hosts h0 | grep -q ' up '; }
is_released() { ! tarn get reservations | grep -q "$1"; }
# reserve VM: one slice and some local memory
reserve() {
  tarn reserve --host h0 --vm $1 --pool 1GiB --local 512MiB --cores 2 --request-id $1 --wait-ready && tarn commit $1
}
# start VM INITRD
start() {
  vmm-plugin run --uid 65534 --gid 65534 --shutdown-timeout 10m --vm $1 --cpus 2 --kernel /guest/6.12 --initrd /guest/$2 --serial file=/run/$1.console \
    --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/$1.log &
  VMM=$!
}
rounds() { grep -c '^ROUND' /run/$1.console; }
more() { [ $(rounds $1) -gt $2 ]; }
# progress VM WHEN: two more rounds
progress() { wait_for more $1 $(($(rounds $1)+1)); echo "PROGRESS $2"; }
pool-manager init --config /run/rack.toml
manager
agent
wait_for up
"#;

/// Guest script that writes 16 MiB on each of two nodes, and verifies the data in each round until
/// the power button is pressed.
const CHECKSUM_SCRIPT: &str = r#"
exec 3< /dev/input/event0
(head -c 1 <&3 > /dev/null; touch /pressed) &
for n in 0 1; do mkdir /n$n; mount -t tmpfs -o size=128m,mpol=bind:$n n$n /n$n; done
head -c 16777216 /dev/urandom > /n0/data
cp /n0/data /n1/data
SUM=$(md5sum < /n0/data)
n=0
while [ ! -e /pressed ]; do
  n=$((n+1))
  for at in /n0 /n1; do
    [ "$(md5sum < $at/data)" = "$SUM" ] || echo "WRONG in round $n of $at"
  done
  echo "ROUND $n"
  sleep 0.5
done
echo "SUMS END"
"#;

#[test]
fn guest_data_survives_pause_and_restarts_of_services() {
    let script = format!(
        r#"{RACK_SCRIPT}
reserve sums; start sums sums
wait_for more sums 1
vmm-plugin pause sums; before=$(rounds sums); sleep 5; echo "PAUSED $before $(rounds sums)"
vmm-plugin resume sums; progress sums resumed
kill -9 $AGENT; progress sums without-agent; wait_for down; agent; wait_for up; progress sums new-agent
kill -9 $MANAGER; progress sums without-manager; manager; wait_for up; progress sums new-manager
vmm-plugin info sums -o json
vmm-plugin stop sums --timeout 10m; wait $VMM; echo "CODE $?"
wait_for is_released sums; echo "RELEASED"
cat /run/sums.console /run/sums.log
"#
    );
    let output = run_script(&script);
    let paused = words_after(&output, "PAUSED");
    assert_eq!(paused[0], paused[1], "a paused guest must not make progress: {output}");
    for when in ["resumed", "without-agent", "new-agent", "without-manager", "new-manager"] {
        assert!(output.contains(&format!("PROGRESS {when}\n")), "{when}: {output}");
    }
    assert!(!output.contains("WRONG") && output.contains("SUMS END"), "{output}");
    assert_eq!(words_after(&output, "CODE"), ["0"], "{output}");
    assert!(output.contains("RELEASED"), "{output}");
}

#[test]
fn lost_slice_ends_only_its_own_guest() {
    let script = format!(
        r#"{RACK_SCRIPT}
reserve stays; start stays sums; STAYS=$VMM
wait_for more stays 0
reserve loses; start loses sums
wait_for more loses 0
tarn release loses --force --reason test
wait $VMM; echo "LOST $?"; cat /run/loses.log
progress stays beside-a-loss
reserve starves
dd if=/dev/zero of=/run/emc/filler bs=1M 2> /dev/null
start starves greedy
wait $VMM; echo "STARVED $?"; cat /run/starves.log
progress stays beside-a-starving-one
vmm-plugin stop stays --timeout 10m; wait $STAYS; echo "STAYED $?"
cat /run/stays.console
"#
    );
    let output = run_script(&script);
    assert_eq!(words_after(&output, "LOST"), ["20"], "{output}");
    assert!(
        output.contains(" lost slice ") && output.contains(" of EMC emc0: the rack revoked it"),
        "{output}"
    );
    assert_eq!(words_after(&output, "STARVED"), ["21"], "{output}");
    assert!(output.contains("host memory exhausted"), "{output}");
    assert_eq!(words_after(&output, "STAYED"), ["0"], "{output}");
    assert!(!output.contains("WRONG"), "{output}");
}

/// Guest script that writes more memory on the pool node than the host has free.
const EXHAUST_SCRIPT: &str = r#"
mkdir /n1; mount -t tmpfs -o size=200m,mpol=bind:1 n1 /n1
dd if=/dev/zero of=/n1/data bs=1M count=100
echo "nothing happened"
"#;

fn run_script(script: &str) -> String {
    let artifacts = artifacts();
    let host = create_host(&artifacts, script);
    for program in ["pool-manager", "host-agent", "tarn"] {
        host.add_program(&programs_dir().join(program)).unwrap();
    }
    add_guest(&host, &artifacts, "sums", "6.12", CHECKSUM_SCRIPT);
    add_guest(&host, &artifacts, "greedy", "6.12", EXHAUST_SCRIPT);
    run_host(host)
}
