//! Rack in a box for tests: real hosts with real CXL memory between them, and the state of each
//! slice in their kernels, which has precedence over the programs' reports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    os::unix::fs::FileExt as _,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use emulated_host::rack::{Device, Plan, Programs, Rack, RackHost, RackPlan};
use rustix::fs::SeekFrom;
use serde_json::Value;

use crate::{linux_guests::bed, rack::programs};

/// How long anything may take before a test gives up on it: hosts are emulated, and the machines are shared.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Between two looks at all kernels, which have other things to do, too.
const WATCH_EVERY: Duration = Duration::from_millis(500);
const MIB: usize = 1 << 20;
/// Where agents hand out memory.
const SOCKET: &str = "/run/tarn-agent/host-memory.sock";
/// One line for each slice that a kernel has anything of: the device's serial, the slice's index on it, the driver, and how many of
/// its memory blocks are not offline.
const SLICES: &str = r#"
# Nothing is started for each block, as it is asked often.
read -r hex < /sys/devices/system/memory/block_size_bytes
block=$((0x$hex))
for region in /sys/bus/cxl/devices/region*; do
  [ -e $region/resource ] || continue
  read -r base < $region/resource
  read -r size < $region/size
  read -r decoder < $region/target0
  read -r serial < /sys/bus/cxl/devices/$decoder/../uport/serial
  base=$((base)) end=$((base + size))
  # Not from the devices' own files: Linux 6.12 may wait for ever for whoever reads them while it takes their memory.
  grep -oE '[0-9a-f]+-[0-9a-f]+ : dax[0-9]+\.[1-9][0-9]*$' /proc/iomem | while read -r range colon name; do
    start=$((0x${range%-*}))
    [ $start -ge $base ] && [ $start -lt $end ] || continue
    driver=$(readlink /sys/bus/dax/devices/$name/driver)
    online=0 at=$start
    while [ $at -lt $((start + 1073741824)) ]; do
      state=offline
      read -r state 2> /dev/null < /sys/devices/system/memory/memory$((at / block))/state
      [ $state = offline ] || online=$((online + 1))
      at=$((at + block))
    done
    driver=${driver##*/}
    echo "SLICE $serial $(((start - base) / 1073741824)) ${driver:-none} $online"
  done
done
"#;

/// A slice as a kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Driver of its device: `device_dax`, `kmem`, or `none`.
    pub driver: String,
    /// Memory blocks of it that are not offline.
    pub blocks: u32,
}

/// Which slice: its device's serial, and its index there.
pub type Which = (String, u32);

/// A rack in a box.
#[derive(Debug)]
pub struct RealRack {
    /// The rack itself.
    pub rack: Rack,
    _folder: tempfile::TempDir,
}

/// A rack of hosts that share devices of so many slices each.
pub fn plan(hosts: usize, slices: &[u32], backend: &str) -> RackPlan {
    let bin = |name: &str| programs().join(name);
    let programs = Programs {
        manager: bin("pool-manager"),
        agent: bin("host-agent"),
        tarn: bin("tarn"),
        power_off: bin("power-off-host"),
    };
    let device = |(n, gib): (u64, &u32)| Device { serial: 0x7a0 + n, gib: *gib, is_aligned: true };
    let mut hosts = Plan::new(hosts, (0..).zip(slices).map(device).collect());
    hosts.programs.push(bin("tarn"));
    RackPlan::new(hosts, programs, backend)
}

impl RealRack {
    /// Starts a rack, and waits until all its hosts are up.
    pub fn start(plan: RackPlan) -> Self {
        let folder = tempfile::Builder::new().prefix("tarn-rack-").tempdir().expect("a temporary folder");
        let rack = Rack::start(&bed(), plan, folder.path(), || true);
        Self { rack: rack.unwrap_or_else(|error| panic!("{error}")), _folder: folder }
    }

    fn devices(&self) -> &[Device] {
        &self.rack.plan().hosts.devices
    }

    /// One of its hosts.
    pub fn host(&self, host: usize) -> &RackHost {
        &self.rack.hosts().all()[host]
    }

    /// One of its hosts, to be switched on or off.
    pub fn host_mut(&mut self, host: usize) -> &mut RackHost {
        &mut self.rack.hosts_mut().all_mut()[host]
    }

    /// Returns the output of a command on a host, which must succeed.
    pub fn run(&self, host: usize, command: &str) -> String {
        let said = self.host(host).run_within(command, PATIENCE);
        let said = said.unwrap_or_else(|error| panic!("{command}: {error}"));
        assert_eq!(said.status, 0, "{command}: {}\n{}", said.text, self.logs());
        said.text
    }

    /// Runs `tarn` as an operator.
    pub fn try_tarn(&self, words: &str) -> Output {
        let words: Vec<&str> = words.split_whitespace().collect();
        self.rack.tarn(&words).output().expect("tarn runs")
    }

    /// Returns the output of `tarn`, which must succeed.
    pub fn tarn(&self, words: &str) -> String {
        let output = self.try_tarn(words);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "tarn {words}: {error}\n{}", self.logs());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the output of `tarn` as JSON.
    pub fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.tarn(&format!("{words} -o json"))).expect("tarn speaks JSON")
    }

    /// The states of all slices, in order.
    pub fn states(&self) -> Vec<String> {
        let slices = self.json("get slices");
        let all = slices.as_array().expect("a list");
        all.iter().map(|slice| slice["state"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Waits until something holds.
    pub fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let give_up = Instant::now() + PATIENCE;
        while !holds(self) {
            let slices = || self.try_tarn("get slices -o wide").stdout;
            assert!(
                Instant::now() < give_up,
                "{what}: not within {PATIENCE:?}\n{}\n{}",
                String::from_utf8_lossy(&slices()),
                self.logs()
            );
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until every slice is free.
    pub fn until_free(&self) {
        self.until("all slices are free", |rack| rack.states().iter().all(|state| state == "free"));
    }

    /// Returns all logs.
    pub fn logs(&self) -> String {
        let agents = self
            .rack
            .hosts()
            .all()
            .iter()
            .map(|host| format!("{} ({}):\n{}\n", host.name(), power(host), tail(&host.agent_log())));
        format!("manager:\n{}\n{}", tail(&self.rack.manager_log()), agents.collect::<String>())
    }

    /// Returns the slices in a host's kernel.
    pub fn kernel(&self, host: usize) -> BTreeMap<Which, Seen> {
        kernel_of(self.host(host)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Reserves slices and waits until they can be used.
    pub fn reserve(&self, host: usize, vm: &str, slices: u32) {
        self.tarn(&format!(
            "reserve --host h{host} --vm {vm} --pool {slices}GiB --cores 1 --request-id {vm} --wait-ready"
        ));
        self.tarn(&format!("commit {vm}"));
    }

    /// The slices of a device that hold anything but zeros, as this machine sees it from outside. Only what the file system says
    /// to hold something is read.
    pub fn not_zero(&self, device: usize) -> Vec<u32> {
        let device = &self.devices()[device];
        let file = File::open(self.rack.hosts().memory_of(device)).expect("the device's file");
        (0..device.gib)
            .filter(|slice| !is_zero(&file, u64::from(*slice) << 30..u64::from(slice + 1) << 30))
            .collect()
    }

    /// Starts a process that uses a VM's slices like a VMM, and returns the slices that were not
    /// zeroed.
    pub fn start_vm(&self, host: usize, vm: &str, touch_mib: u32) -> Vec<u64> {
        self.run(
            host,
            &format!(
                "mkfifo /run/{vm}.in; sleep 100000 > /run/{vm}.in 2> /dev/null & echo $! > /run/{vm}.sleep; \
                 tarn stand-in-vm --socket {SOCKET} --vm {vm} --touch {touch_mib} --look {touch_mib} < /run/{vm}.in > /run/{vm}.out \
                 2> /run/{vm}.err & echo $! > /run/{vm}.pid"
            ),
        );
        self.until(&format!("{vm} has looked at its slices"), |rack| {
            let errors = rack.run(host, &format!("cat /run/{vm}.err"));
            assert_eq!(errors, "", "{vm}: {}", rack.logs());
            rack.run(host, &format!("wc -l < /run/{vm}.out")).trim() == "1"
        });
        let found: Value =
            serde_json::from_str(&self.run(host, &format!("cat /run/{vm}.out"))).expect("JSON");
        found["dirty"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
    }

    /// Ends such a process as a guest that switches itself off does, and returns the slices in which its bytes were not there.
    pub fn end_vm(&self, host: usize, vm: &str) -> Vec<u64> {
        self.run(host, &format!("kill $(cat /run/{vm}.sleep)"));
        self.until(&format!("{vm} has looked at its bytes again"), |rack| {
            rack.run(host, &format!("wc -l < /run/{vm}.out")).trim() == "2"
        });
        let left = self.run(host, &format!("tail -n 1 /run/{vm}.out; rm /run/{vm}.*"));
        let left: Value = serde_json::from_str(&left).expect("JSON");
        left["overwritten"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
    }

    /// Ends such a process at once, as a crash does.
    pub fn kill_vm(&self, host: usize, vm: &str) {
        self.run(host, &format!("kill -9 $(cat /run/{vm}.pid); kill $(cat /run/{vm}.sleep); rm /run/{vm}.*"));
    }

    /// How the manager sees a host: `up`, `unknown`, `fenced` and so on.
    pub fn host_state(&self, host: usize) -> String {
        self.json("get hosts")[host]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the manager sees a host so.
    pub fn until_host(&self, host: usize, state: &str) {
        self.until(&format!("h{host} is {state}"), |rack| rack.host_state(host) == state);
    }

    /// Looks at all kernels again and again while something is done: no slice is on two hosts at any moment. Returns how often it
    /// was looked, and the outcome.
    pub fn watched<T>(&self, work: impl FnOnce() -> T) -> (usize, T) {
        let watch = self.watch();
        let outcome = work();
        (watch.end(), outcome)
    }

    /// Looks at all kernels again and again from now on: no slice is on two hosts at any moment.
    pub fn watch(&self) -> Watch {
        let folder = self.rack.hosts().folder();
        let all = self.rack.hosts().all().iter();
        let hosts: Vec<RackHost> =
            all.map(|host| RackHost::find(folder, host.name()).expect("it was started")).collect();
        let done = Arc::new(AtomicBool::new(false));
        let is_done = Arc::clone(&done);
        let watcher = thread::spawn(move || {
            let mut looks = 0;
            while !is_done.load(Ordering::Relaxed) {
                looks += usize::from(see_one_owner(&hosts));
                thread::sleep(WATCH_EVERY);
            }
            looks
        });
        Watch { done, watcher: Some(watcher) }
    }

    /// What the kernels have is what the manager says: slices that are online on their hosts, and no others. Hosts without power
    /// have nothing.
    pub fn assert_agreed(&self) {
        let mut said: BTreeMap<String, BTreeSet<Which>> = BTreeMap::new();
        let mut on_device: BTreeMap<String, u32> = BTreeMap::new();
        for slice in self.json("get slices").as_array().expect("a list") {
            let text = |field: &str| slice[field].as_str().unwrap_or_default();
            let next = on_device.entry(text("emc").to_owned()).or_default();
            let number: usize = text("emc").trim_start_matches("emc").parse().expect("a number");
            let which = (format!("{:#x}", self.devices()[number].serial), *next);
            *next += 1;
            match text("state") {
                "online" => drop(said.entry(text("host").to_owned()).or_default().insert(which)),
                "free" | "quarantined" => {}
                moving => panic!("{which:?} is {moving}\n{}", self.logs()),
            }
        }
        for (n, host) in self.rack.hosts().all().iter().enumerate() {
            if host.is_on().expect("the kernel says") {
                let seen: BTreeSet<Which> = self.kernel(n).into_keys().collect();
                let said = said.remove(host.name()).unwrap_or_default();
                assert_eq!(seen, said, "{}\n{}", host.name(), self.logs());
            }
        }
        assert!(said.is_empty(), "{said:?} on hosts without power");
    }

    /// All devices hold only zeros, as read from outside.
    pub fn assert_zero(&self) {
        for device in 0..self.devices().len() {
            assert_eq!(
                self.not_zero(device),
                [0; 0],
                "slices of device {device} hold something\n{}",
                self.logs()
            );
        }
    }
}

/// Observer of all kernels, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    done: Arc<AtomicBool>,
    watcher: Option<JoinHandle<usize>>,
}

impl Watch {
    /// Ends it, and returns how often it was looked. It was seen that each slice had one owner.
    pub fn end(mut self) -> usize {
        self.done.store(true, Ordering::Relaxed);
        let watcher = self.watcher.take().expect("it ends once");
        watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        let _ = self.watcher.take().map(JoinHandle::join); // the test has failed already
    }
}

/// A slice that one host had before and after another host had it was on both at that moment. A host that does not answer is
/// left out, and then the look does not count.
fn see_one_owner(hosts: &[RackHost]) -> bool {
    let mut all = true;
    for (n, first) in hosts.iter().enumerate() {
        for second in &hosts[n + 1..] {
            let looks = [first, second, first].map(|host| kernel_of(host).inspect_err(|_| all = false));
            let looks = looks.map(Result::unwrap_or_default);
            let [before, other, after] = looks.map(|seen| seen.into_keys().collect::<BTreeSet<_>>());
            let both: Vec<_> = before.intersection(&after).filter(|slice| other.contains(*slice)).collect();
            assert!(both.is_empty(), "{both:?} are on {} and {}", first.name(), second.name());
        }
    }
    all
}

/// Rejects unexpected output, because a check without input would always pass.
fn kernel_of(host: &RackHost) -> Result<BTreeMap<Which, Seen>, emulated_host::HostError> {
    let emulated_host::rack::CommandOutput { status, text: said } = host.run(SLICES)?;
    assert_eq!(status, 0, "{}: {said}", host.name());
    let mut slices = BTreeMap::new();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["SLICE", serial, index, driver, blocks] => {
                let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("{}: {said}", host.name()));
                let seen = Seen { driver: driver.to_owned(), blocks: number(blocks) };
                slices.insert((serial.to_owned(), number(index)), seen);
            }
            _ => panic!("{}: {said}", host.name()),
        }
    }
    Ok(slices)
}

fn is_zero(file: &File, range: Range<u64>) -> bool {
    let (mut bytes, zeros) = (vec![0; MIB], vec![0; MIB]);
    let mut at = range.start;
    loop {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < range.end => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => return true,
            Err(errno) => panic!("the device's file: {errno}"),
        };
        at = data - data % bytes.len() as u64;
        file.read_exact_at(&mut bytes, at).expect("it can be read");
        if bytes != zeros {
            return false;
        }
        at += bytes.len() as u64;
    }
}

/// Whether a host has power: its process may have ended without a log entry.
fn power(host: &RackHost) -> &'static str {
    match host.is_on() {
        Ok(true) => "on",
        Ok(false) => "off",
        Err(_) => "power state unknown",
    }
}

fn tail(log: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
