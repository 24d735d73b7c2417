//! Rack of emulated hosts for tests. Each host runs its own kernel and shares CXL memory with the
//! other hosts. Checks compare the state of the manager with the slices in the kernels.

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

use crate::{linux_guests::artifacts, rack::programs_dir};

/// Time limit of every wait. It is high because hosts are emulated and test machines are shared.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(600);
/// Interval between two checks of a condition. Many checks run a command on a host, whose only CPU also
/// runs the tested programs.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two checks that no slice is in two kernels.
const OWNER_CHECK_INTERVAL: Duration = Duration::from_millis(500);
const MIB: usize = 1 << 20;
/// Path of the socket on which an agent provides memory to VMs.
pub const HOST_MEMORY_SOCKET: &str = "/run/tarn-agent/host-memory.sock";
/// Shell script that prints one line per slice in a kernel: serial number of the device, index of
/// the slice, driver, and number of memory blocks that are not offline.
const LIST_SLICES_SCRIPT: &str = r#"
# Starts no process per memory block, because this script runs often.
read -r hex < /sys/devices/system/memory/block_size_bytes
block=$((0x$hex))
for region in /sys/bus/cxl/devices/region*; do
  [ -e $region/resource ] || continue
  read -r base < $region/resource
  read -r size < $region/size
  read -r decoder < $region/target0
  read -r serial < /sys/bus/cxl/devices/$decoder/../uport/serial
  base=$((base)) end=$((base + size))
  # Reads /proc/iomem instead of the files of the devices: in Linux 6.12, a reader of these files can block the
  # removal of the memory forever.
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

/// Shell command that prints a line per region of CXL memory and per slice in a kernel, such as
/// `490000000-4cfffffff : dax0.1`. All hosts of a rack map a slice to the same addresses. Starts only one
/// process, because this command runs often.
const LIST_SLICE_ADDRESSES_COMMAND: &str =
    r"grep -oE '[0-9a-f]+-[0-9a-f]+ : (region[0-9]+|dax[0-9]+\.[1-9][0-9]*)$' /proc/iomem";

/// State of a slice in the kernel of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSlice {
    /// Driver of the dax device: `device_dax`, `kmem` or `none`.
    pub driver: String,
    /// Number of memory blocks of the slice that are not offline.
    pub blocks: u32,
}

/// Serial number of a device, and index of a slice on this device.
pub type SliceLocation = (String, u32);

/// Rack of emulated hosts. Dropping the value stops the rack.
#[derive(Debug)]
pub struct EmulatedRack {
    /// Rack as implemented by the crate `emulated-host`.
    pub rack: Rack,
    _folder: tempfile::TempDir,
}

/// Returns the plan of a rack. All hosts share devices with the given numbers of slices.
pub fn plan(hosts: usize, slices: &[u32], backend: &str) -> RackPlan {
    let program = |name: &str| programs_dir().join(name);
    let programs = Programs {
        manager: program("pool-manager"),
        agent: program("host-agent"),
        tarn: program("tarn"),
        power_off: program("power-off-host"),
    };
    let device = |(n, gib): (u64, &u32)| Device { serial: 0x7a0 + n, gib: *gib, is_aligned: true };
    let mut hosts = Plan::new(hosts, (0..).zip(slices).map(device).collect());
    hosts.programs.push(program("tarn"));
    RackPlan::new(hosts, programs, backend)
}

impl EmulatedRack {
    /// Starts a rack and waits until all hosts are up.
    pub fn start(plan: RackPlan) -> Self {
        let folder =
            tempfile::Builder::new().prefix("tarn-rack-").tempdir().expect("a temporary folder is created");
        let rack = Rack::start(&artifacts(), plan, folder.path(), || true);
        Self { rack: rack.unwrap_or_else(|error| panic!("{error}")), _folder: folder }
    }

    fn devices(&self) -> &[Device] {
        &self.rack.plan().hosts.devices
    }

    /// Returns the host with this index.
    pub fn host(&self, host: usize) -> &RackHost {
        &self.rack.hosts().as_slice()[host]
    }

    /// Returns the host with this index, to power the host on or off.
    pub fn host_mut(&mut self, host: usize) -> &mut RackHost {
        &mut self.rack.hosts_mut().as_mut_slice()[host]
    }

    /// Runs a command on a host and returns its output. The command must succeed.
    pub fn run(&self, host: usize, command: &str) -> String {
        let output = self.host(host).run_with_timeout(command, WAIT_TIMEOUT);
        let output = output.unwrap_or_else(|error| panic!("{command}: {error}\n{}", self.logs()));
        assert_eq!(output.status, 0, "{command}: {}\n{}", output.text, self.logs());
        output.text
    }

    /// Runs `tarn` as an operator. The command may fail.
    pub fn try_tarn(&self, arguments: &str) -> Output {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        self.rack.tarn_command(&arguments).output().expect("tarn runs")
    }

    /// Runs `tarn` as an operator and returns its output. The command must succeed.
    pub fn tarn(&self, arguments: &str) -> String {
        let output = self.try_tarn(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "tarn {arguments}: {error}\n{}", self.logs());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs `tarn` with JSON output and returns the parsed output. The command must succeed.
    pub fn tarn_json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.tarn(&format!("{arguments} -o json"))).expect("the output is JSON")
    }

    /// Returns the states of all slices in the manager, in order.
    pub fn slice_states(&self) -> Vec<String> {
        let slices = self.tarn_json("get slices");
        let all = slices.as_array().expect("the output is a list");
        all.iter().map(|slice| slice["state"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Waits until a condition holds. Fails after [`WAIT_TIMEOUT`].
    pub fn wait_until(&self, condition_name: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !condition(self) {
            let slices = || self.try_tarn("get slices -o wide").stdout;
            assert!(
                Instant::now() < deadline,
                "{condition_name}: does not hold within {WAIT_TIMEOUT:?}\n{}\n{}",
                String::from_utf8_lossy(&slices()),
                self.logs()
            );
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until every slice is free.
    pub fn wait_all_slices_free(&self) {
        self.wait_until("all slices are free", |rack| {
            rack.slice_states().iter().all(|state| state == "free")
        });
    }

    /// Returns the last lines of the logs of the manager and of all agents.
    pub fn logs(&self) -> String {
        let agents = self.rack.hosts().as_slice().iter().map(|host| {
            format!("{} ({}):\n{}\n", host.name(), describe_power(host), last_lines(&host.agent_log()))
        });
        format!("manager:\n{}\n{}", last_lines(&self.rack.manager_log()), agents.collect::<String>())
    }

    /// Returns the slices in the kernel of a host.
    pub fn kernel_slices(&self, host: usize) -> BTreeMap<SliceLocation, KernelSlice> {
        read_kernel_slices(self.host(host)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Reserves slices for a VM, waits until the slices are online, and commits the reservation.
    pub fn reserve(&self, host: usize, vm: &str, slices: u32) {
        self.tarn(&format!(
            "reserve --host h{host} --vm {vm} --pool {slices}GiB --cores 1 --request-id {vm} --wait-ready"
        ));
        self.tarn(&format!("commit {vm}"));
    }

    /// Returns the slices of a device that contain data. Reads the memory file of the device on
    /// this machine; holes of the file are zero.
    pub fn nonzero_slices(&self, device: usize) -> Vec<u32> {
        let device = &self.devices()[device];
        let file = File::open(self.rack.hosts().device_link(device))
            .expect("the memory file of the device can be opened");
        (0..device.gib)
            .filter(|slice| !is_zero(&file, u64::from(*slice) << 30..u64::from(slice + 1) << 30))
            .collect()
    }

    /// Starts a test VMM, which attaches the memory of a VM. Returns the slices that were not
    /// zeroed.
    pub fn start_vm(&self, host: usize, vm: &str, touch_mib: u32) -> Vec<u64> {
        self.start_test_vmm(host, vm, &test_vmm_command(vm, touch_mib))
    }

    /// Starts a test VMM like [`EmulatedRack::start_vm`], as a user of the host.
    pub fn start_vm_as(&self, user: &str, host: usize, vm: &str, touch_mib: u32) -> Vec<u64> {
        self.start_test_vmm(
            host,
            vm,
            &format!("su -s /bin/sh {user} -c 'exec {}'", test_vmm_command(vm, touch_mib)),
        )
    }

    fn start_test_vmm(&self, host: usize, vm: &str, command: &str) -> Vec<u64> {
        self.run(
            host,
            &format!(
                "mkfifo /run/{vm}.in; sleep 100000 > /run/{vm}.in 2> /dev/null & echo $! > /run/{vm}.sleep; \
                 {command} < /run/{vm}.in > /run/{vm}.out 2> /run/{vm}.err & echo $! > /run/{vm}.pid"
            ),
        );
        self.wait_until(&format!("{vm} has checked its slices"), |rack| {
            let errors = rack.run(host, &format!("cat /run/{vm}.err"));
            assert_eq!(errors, "", "{vm}: {}", rack.logs());
            rack.run(host, &format!("wc -l < /run/{vm}.out")).trim() == "1"
        });
        let report: Value =
            serde_json::from_str(&self.run(host, &format!("cat /run/{vm}.out"))).expect("JSON");
        report["dirty"].as_array().expect("the output is a list").iter().filter_map(Value::as_u64).collect()
    }

    /// Ends a test VMM and waits for its final check. Returns the slices in which its data
    /// was overwritten.
    pub fn end_vm(&self, host: usize, vm: &str) -> Vec<u64> {
        self.run(host, &format!("kill $(cat /run/{vm}.sleep)"));
        self.wait_until(&format!("{vm} has checked its data again"), |rack| {
            rack.run(host, &format!("wc -l < /run/{vm}.out")).trim() == "2"
        });
        let report = self.run(host, &format!("tail -n 1 /run/{vm}.out; rm /run/{vm}.*"));
        let report: Value = serde_json::from_str(&report).expect("JSON");
        report["overwritten"]
            .as_array()
            .expect("the output is a list")
            .iter()
            .filter_map(Value::as_u64)
            .collect()
    }

    /// Kills a test VMM.
    pub fn kill_vm(&self, host: usize, vm: &str) {
        self.run(host, &format!("kill -9 $(cat /run/{vm}.pid); kill $(cat /run/{vm}.sleep); rm /run/{vm}.*"));
    }

    /// Returns the state of a host in the manager, such as `up`, `unknown` or `fenced`.
    pub fn host_state(&self, host: usize) -> String {
        self.tarn_json("get hosts")[host]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until a host is in this state in the manager.
    pub fn wait_host_state(&self, host: usize, state: &str) {
        self.wait_until(&format!("h{host} is {state}"), |rack| rack.host_state(host) == state);
    }

    /// Runs `work` and checks periodically that no slice is on two hosts. Returns the number of
    /// checks that found slices, and the result of `work`.
    pub fn with_owner_watch<T>(&self, work: impl FnOnce() -> T) -> (usize, T) {
        let watch = self.watch_owners();
        let outcome = work();
        (watch.finish(), outcome)
    }

    /// Starts a thread that checks periodically that no slice is on two hosts.
    pub fn watch_owners(&self) -> OwnerWatch {
        let folder = self.rack.hosts().folder();
        let all = self.rack.hosts().as_slice().iter();
        let hosts: Vec<RackHost> =
            all.map(|host| RackHost::find(folder, host.name()).expect("the host was started")).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let watcher = thread::spawn(move || {
            let mut checks = 0;
            while !is_stopped.load(Ordering::Relaxed) {
                checks += usize::from(check_single_owner(&hosts));
                thread::sleep(OWNER_CHECK_INTERVAL);
            }
            checks
        });
        OwnerWatch { stop, watcher: Some(watcher) }
    }

    /// Checks that the kernel of each host has exactly the slices that the manager lists as online
    /// on this host. Hosts that are off must have no online slices.
    pub fn assert_kernels_match_manager(&self) {
        let mut online: BTreeMap<String, BTreeSet<SliceLocation>> = BTreeMap::new();
        let mut next_index: BTreeMap<String, u32> = BTreeMap::new();
        for slice in self.tarn_json("get slices").as_array().expect("the output is a list") {
            let text = |field: &str| slice[field].as_str().unwrap_or_default();
            let next = next_index.entry(text("emc").to_owned()).or_default();
            let number: usize =
                text("emc").trim_start_matches("emc").parse().expect("the name of an EMC ends with a number");
            let location = (format!("{:#x}", self.devices()[number].serial), *next);
            *next += 1;
            match text("state") {
                "online" => drop(online.entry(text("host").to_owned()).or_default().insert(location)),
                "free" | "quarantined" => {}
                moving => panic!(
                    "slice {location:?} is {moving}: must be online, free or quarantined\n{}",
                    self.logs()
                ),
            }
        }
        for (n, host) in self.rack.hosts().as_slice().iter().enumerate() {
            if host.is_powered_on().expect("the power state is known") {
                let in_kernel: BTreeSet<SliceLocation> = self.kernel_slices(n).into_keys().collect();
                let expected = online.remove(host.name()).unwrap_or_default();
                assert_eq!(in_kernel, expected, "{}\n{}", host.name(), self.logs());
            }
        }
        assert!(online.is_empty(), "{online:?} are online on hosts that are off");
    }

    /// Checks that the memory of all devices is zero.
    pub fn assert_devices_zeroed(&self) {
        for device in 0..self.devices().len() {
            assert_eq!(
                self.nonzero_slices(device),
                [0; 0],
                "slices of device {device} are not zero\n{}",
                self.logs()
            );
        }
    }
}

/// Thread that checks all kernels periodically. Dropping the value stops the thread.
#[derive(Debug)]
pub struct OwnerWatch {
    stop: Arc<AtomicBool>,
    watcher: Option<JoinHandle<usize>>,
}

impl OwnerWatch {
    /// Stops the thread and returns the number of checks that found slices.
    ///
    /// # Panics
    /// Panics if a slice was on two hosts.
    pub fn finish(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let watcher = self.watcher.take().expect("finish is called once");
        watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for OwnerWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.watcher.take().map(JoinHandle::join); // ignores a panic: the test has already failed
    }
}

/// Checks that no slice is on two hosts at the same time. For each pair of hosts, reads the slices
/// of the first host, of the second host, and again of the first host. A slice in all three results
/// was on both hosts. Returns `false` if no slice was on a host, or if a host did not reply or is booting.
fn check_single_owner(hosts: &[RackHost]) -> bool {
    let mut all = true;
    let mut has_slices = false;
    for (n, first) in hosts.iter().enumerate() {
        for second in &hosts[n + 1..] {
            let checks = [first, second, first].map(read_slice_addresses);
            all &= checks.iter().all(Option::is_some);
            let [before, other, after] = checks.map(Option::unwrap_or_default);
            has_slices |= !before.is_empty() || !other.is_empty();
            let shared: Vec<_> = before.intersection(&after).filter(|slice| other.contains(*slice)).collect();
            assert!(
                shared.is_empty(),
                "slices {shared:?} are on both {} and {}",
                first.name(),
                second.name()
            );
        }
    }
    all && has_slices
}

/// Reads the addresses of the slices in the kernel of a host. Returns `None` if the host did not reply, or
/// if it boots and has no CXL memory yet.
fn read_slice_addresses(host: &RackHost) -> Option<BTreeSet<String>> {
    let output = host.run(LIST_SLICE_ADDRESSES_COMMAND).ok()?.text;
    let lines = output.lines().filter_map(|line| line.split_once(" : "));
    let (regions, slices): (Vec<_>, Vec<_>) = lines.partition(|(_, name)| name.starts_with("region"));
    (!regions.is_empty()).then(|| slices.into_iter().map(|(addresses, _)| addresses.to_owned()).collect())
}

/// Reads the slices in the kernel of a host. Panics on unexpected output, because a check of an
/// empty list would always pass.
fn read_kernel_slices(
    host: &RackHost,
) -> Result<BTreeMap<SliceLocation, KernelSlice>, emulated_host::HostError> {
    let emulated_host::rack::CommandOutput { status, text: output } = host.run(LIST_SLICES_SCRIPT)?;
    assert_eq!(status, 0, "{}: {output}", host.name());
    let mut slices = BTreeMap::new();
    for line in output.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            ["SLICE", serial, index, driver, blocks] => {
                let number =
                    |word: &str| word.parse().unwrap_or_else(|_| panic!("{}: {output}", host.name()));
                let slice = KernelSlice { driver: driver.to_owned(), blocks: number(blocks) };
                slices.insert((serial.to_owned(), number(index)), slice);
            }
            _ => panic!("{}: {output}", host.name()),
        }
    }
    Ok(slices)
}

/// Returns the command of the test VMM of a VM.
fn test_vmm_command(vm: &str, touch_mib: u32) -> String {
    format!("tarn test-vmm --socket {HOST_MEMORY_SOCKET} --vm {vm} --touch {touch_mib} --verify {touch_mib}")
}

fn is_zero(file: &File, range: Range<u64>) -> bool {
    let (mut bytes, zeros) = (vec![0; MIB], vec![0; MIB]);
    let mut at = range.start;
    loop {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < range.end => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => return true,
            Err(errno) => panic!("cannot seek in the memory file of the device: {errno}"),
        };
        at = data - data % bytes.len() as u64;
        file.read_exact_at(&mut bytes, at).expect("the file is readable");
        if bytes != zeros {
            return false;
        }
        at += bytes.len() as u64;
    }
}

/// Returns the power state of a host for an error message.
fn describe_power(host: &RackHost) -> &'static str {
    match host.is_powered_on() {
        Ok(true) => "on",
        Ok(false) => "off",
        Err(_) => "power state unknown",
    }
}

fn last_lines(log: &str) -> String {
    const PRINTED_LINES: usize = 40;
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(PRINTED_LINES)..].join("\n")
}
