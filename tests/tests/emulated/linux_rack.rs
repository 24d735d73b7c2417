//! Stock Debian guests on a real rack, inside an emulated host with nested paging: contents of a
//! pool node survive restarts of agent and manager, and a slice that is taken away ends only its
//! guest.

use tests::{
    linux_guests::{add_guest, bed, host, run, words},
    rack::programs,
};

/// A manager and one agent, each of which may be ended by its pid and started again.
const RACK: &str = r#"
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
until_so() {
  n=0
  until "$@" > /dev/null 2>&1; do
    n=$((n+1)); [ $n -gt 3000 ] && { echo "NEVER $*"; tail -n 20 /run/*.log /run/*.console; poweroff -f; }
    sleep 0.2
  done
}
down() { ! up; }
up() { tarn get hosts h0 | grep -q ' up '; }
gone() { ! tarn get reservations | grep -q "$1"; }
# reserve VM: one slice and some local memory
reserve() {
  tarn reserve --host h0 --vm $1 --pool 1GiB --local 512MiB --cores 2 --request-id $1 --wait-ready && tarn commit $1
}
# start VM INITRD
start() {
  vmm-plugin run --uid 65534 --gid 65534 --vm $1 --cpus 2 --kernel /guest/6.12 --initrd /guest/$2 --serial file=/run/$1.console \
    --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/$1.log &
  VMM=$!
}
rounds() { grep -c '^ROUND' /run/$1.console; }
more() { [ $(rounds $1) -gt $2 ]; }
# goes_on VM WHEN: two more rounds
goes_on() { until_so more $1 $(($(rounds $1)+1)); echo "GOES ON $2"; }
manager
until_so test -s /run/store/tokens/h0.token
agent
until_so up
"#;

/// Writes 64 MiB on either node, and reads all of it in each round, until the power button is
/// pressed.
const SUMS: &str = r#"
exec 3< /dev/input/event0
(head -c 1 <&3 > /dev/null; touch /pressed) &
for n in 0 1; do mkdir /n$n; mount -t tmpfs -o size=128m,mpol=bind:$n n$n /n$n; done
head -c 67108864 /dev/urandom > /n0/data
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
fn what_is_on_both_nodes_survives_a_pause_and_a_new_agent_and_a_new_manager() {
    let script = format!(
        r#"{RACK}
reserve sums; start sums sums
until_so more sums 1
vmm-plugin pause sums; before=$(rounds sums); sleep 5; echo "PAUSED $before $(rounds sums)"
vmm-plugin resume sums; goes_on sums resumed
kill -9 $AGENT; goes_on sums without-agent; until_so down; agent; until_so up; goes_on sums new-agent
kill -9 $MANAGER; goes_on sums without-manager; manager; until_so up; goes_on sums new-manager
vmm-plugin info sums -o json
vmm-plugin stop sums; wait $VMM; echo "CODE $?"
until_so gone sums; echo "GIVEN BACK"
cat /run/sums.console /run/sums.log
"#
    );
    let said = rack_with(&script);
    let paused = words(&said, "PAUSED");
    assert_eq!(paused[0], paused[1], "a paused guest stands still: {said}");
    for when in ["resumed", "without-agent", "new-agent", "without-manager", "new-manager"] {
        assert!(said.contains(&format!("GOES ON {when}\n")), "{when}: {said}");
    }
    assert!(!said.contains("WRONG") && said.contains("SUMS END"), "{said}");
    assert_eq!(words(&said, "CODE"), ["0"], "{said}");
    assert!(said.contains("GIVEN BACK"), "{said}");
}

#[test]
fn a_slice_that_is_taken_away_or_has_no_memory_behind_it_ends_its_own_guest_and_no_other() {
    let script = format!(
        r#"{RACK}
reserve stays; start stays sums; STAYS=$VMM
until_so more stays 0
reserve loses; start loses sums
until_so more loses 0
tarn release loses --force --reason test
wait $VMM; echo "LOST $?"; cat /run/loses.log
goes_on stays beside-a-loss
reserve starves
dd if=/dev/zero of=/run/emc/filler bs=1M 2> /dev/null
start starves greedy
wait $VMM; echo "STARVED $?"; cat /run/starves.log
goes_on stays beside-a-starving-one
vmm-plugin stop stays; wait $STAYS; echo "STAYED $?"
cat /run/stays.console
"#
    );
    let said = rack_with(&script);
    assert_eq!(words(&said, "LOST"), ["20"], "{said}");
    assert!(said.contains(" lost slice ") && said.contains(" of EMC emc0: the rack revoked it"), "{said}");
    assert_eq!(words(&said, "STARVED"), ["21"], "{said}");
    assert!(said.contains("host memory exhausted"), "{said}");
    assert_eq!(words(&said, "STAYED"), ["0"], "{said}");
    assert!(!said.contains("WRONG"), "{said}");
}

/// Writes more on the pool node than there is behind it.
const GREEDY: &str = r#"
mkdir /n1; mount -t tmpfs -o size=200m,mpol=bind:1 n1 /n1
dd if=/dev/zero of=/n1/data bs=1M count=100
echo "nothing happened"
"#;

fn rack_with(script: &str) -> String {
    let bed = bed();
    let host = host(&bed, script);
    for program in ["pool-manager", "host-agent", "tarn"] {
        host.program(&programs().join(program)).unwrap();
    }
    add_guest(&host, &bed, "sums", "6.12", SUMS);
    add_guest(&host, &bed, "greedy", "6.12", GREEDY);
    run(host)
}
