//! Stand-in processes of VMs, and the processor time of sampling them.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use benches::{
    failure::Failure,
    process::own_cpu_time,
    report::{Rounds, format_table},
};
use host_agent::{
    host::{
        damon::page_sampler::PageSampler,
        process::{FileId, identify_process},
        sysfs::Sysfs,
        vm_counters::{
            CounterSource as _, EncodedEvent, EventGroup, PerfEvents, ThreadCounters, vcpu_threads,
        },
    },
    metrics::Metrics,
    sampling::Measurements,
};
use pool::agent::Process;
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use units::{Name, ReservationId, limits::DAMON_REGIONS_MAX};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::SAMPLE_INTERVAL;

/// Number of stand-in processes.
const VMS: usize = 50;
/// Memory that each of them maps, in bytes.
const MAPPED_BYTES: u64 = 1 << 30;
/// Memory that each of them writes, in bytes. The memory of this machine is limited.
const WRITTEN_BYTES: u64 = 32 << 20;
/// Number of threads with names of vCPUs in each of them.
const VCPUS: usize = 4;
/// Type of software events (PERF_TYPE_SOFTWARE).
const SOFTWARE: u32 = 1;
/// Event that counts nothing (PERF_COUNT_SW_DUMMY).
const DUMMY_EVENT: u64 = 9;
/// Number of events of each group that a Golden Cove processor counts.
const EVENTS_PER_GROUP: [usize; 4] = [6, 6, 6, 5];
/// Directory of DAMON in sysfs.
const KDAMONDS_FOLDER: &str = "kernel/mm/damon/admin/kdamonds";

/// Runs as a stand-in process until the end of stdin.
pub(crate) fn run_stand_in() -> ExitCode {
    let file =
        File::from(memfd_create("tarn-stand-in", MemfdFlags::CLOEXEC).expect("a memfd can be created"));
    ftruncate(&file, MAPPED_BYTES).expect("the memfd is resizable");
    let bytes = usize::try_from(MAPPED_BYTES).expect("1 GiB fits into the address space");
    let range = (GuestAddress(0), bytes, Some(FileOffset::new(file, 0)));
    let memory: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges_with_files([range]).expect("the file is mapped");
    for page in (0..WRITTEN_BYTES).step_by(4096) {
        memory.write_obj(page, GuestAddress(page)).expect("the memory is mapped");
    }
    for vcpu in 0..VCPUS {
        let thread = std::thread::Builder::new().name(format!("vcpu{vcpu}"));
        thread
            .spawn(|| {
                loop {
                    std::thread::park()
                }
            })
            .expect("a thread can be started");
    }
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]); // the end of stdin
    ExitCode::SUCCESS
}

/// Stand-in process, which ends when the value is dropped.
struct StandIn {
    child: Child,
    process: Process,
}

impl StandIn {
    fn start() -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::file_error("find", "/proc/self/exe"))?;
        let mut command = Command::new(&program);
        command.arg("--stand-in").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|source| Failure::Start { program, source })?;
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).map_err(Failure::file_error("read", "stdout"))?;
        let process = identify_process(child.id());
        let process = process.map_err(|error| unexpected("stand-in process", units::chain(&error)))?;
        Ok(Self { child, process })
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn unexpected(subject: &str, reply: impl Into<String>) -> Failure {
    Failure::UnexpectedReply { subject: subject.to_owned(), reply: reply.into() }
}

/// Processor time per round, in ms.
#[derive(Debug, Default)]
pub(crate) struct SamplingCost {
    measurements: Rounds,
    counters: Rounds,
    damon: Rounds,
    total: Rounds,
    smaps: Rounds,
}

impl SamplingCost {
    /// Returns the median share of one core at the shortest configurable interval, in percent.
    pub(crate) fn core_percent(&self) -> f64 {
        self.total.median() / interval_ms() * 100.0
    }

    /// Returns how many times as long a walk of all page tables takes.
    pub(crate) fn ratio_to_smaps(&self) -> f64 {
        self.smaps.ratio_to(&self.total).median()
    }

    /// Formats the processor time of each part.
    pub(crate) fn table(&self) -> String {
        let percent = |rounds: &Rounds| format!("{:.3}", rounds.median() / interval_ms() * 100.0);
        let row = |name: &str, rounds: &Rounds| vec![name.to_owned(), rounds.spread(2), percent(rounds)];
        let head = [
            &format!("{VMS} stand-in VMs, interval {} s", SAMPLE_INTERVAL.as_secs()),
            "ms per round (min-median-max)",
            "% of a core",
        ];
        let rows = [
            row("threads, steal, faults", &self.measurements),
            row("perf events", &self.counters),
            row("setup of DAMON", &self.damon),
            row("all", &self.total),
            row("smaps of all", &self.smaps),
        ];
        format_table(&head, &rows)
    }
}

fn interval_ms() -> f64 {
    SAMPLE_INTERVAL.as_secs_f64() * 1e3
}

/// Measures the processor time of sampling all stand-in processes.
pub(crate) fn measure(rounds: u32) -> Result<SamplingCost, Failure> {
    raise_descriptor_limit();
    let stand_ins: Vec<StandIn> = (0..VMS).map(|_| StandIn::start()).collect::<Result<_, _>>()?;
    let vms: Vec<(ReservationId, Process)> = stand_ins
        .iter()
        .zip(1..)
        .map(|(stand_in, id)| (ReservationId(id), stand_in.process.clone()))
        .collect();
    let metrics = Arc::new(Metrics::new(&Name::new("h0").expect("a valid name"), "bench"));
    let mut measurements = Measurements::new(&Sysfs::at("/sys"), metrics);
    let mut counters = open_counters(&vms)?;
    let simulated = simulate_damon()?;
    let mut sampler = PageSampler::at(simulated.path(), false);
    let due: BTreeSet<ReservationId> = vms.iter().map(|(id, _)| *id).collect();
    measurements.sample(&vms, &due);
    let mut cost = SamplingCost::default();
    for round in 0..rounds {
        let measured = cpu_ms(|| drop(measurements.sample(&vms, &due)));
        let read = cpu_ms(|| counters.iter_mut().for_each(|thread| drop(thread.read())));
        // DAMON samples one VM in five seconds.
        let vm = &vms[round as usize % VMS].1;
        let mut result = Ok(());
        let started = cpu_ms(|| result = start_damon(&mut sampler, vm));
        result?;
        let damon = started * SAMPLE_INTERVAL.div_duration_f64(units::limits::DAMON_WINDOW.as_duration());
        cost.measurements.add(measured);
        cost.counters.add(read);
        cost.damon.add(damon);
        cost.total.add(measured + read + damon);
        let walk = |process: &Process| drop(fs::read(format!("/proc/{}/smaps", process.pid)));
        cost.smaps.add(cpu_ms(|| vms.iter().for_each(|(_, process)| walk(process))));
        wait_short();
    }
    Ok(cost)
}

/// Raises the limit of open files to its maximum, because each counter is a file.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // A limit that is too low shows as an error when counters are opened.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Lets other processes run between two rounds, so that caches are not warm.
fn wait_short() {
    std::thread::sleep(Duration::from_millis(200));
}

/// Returns the processor time of a call, in ms.
fn cpu_ms(call: impl FnOnce()) -> f64 {
    // The kernel updates the time of a running thread when the thread is interrupted.
    std::thread::yield_now();
    let (before, started) = (own_cpu_time(), Instant::now());
    call();
    std::thread::yield_now();
    let cpu = own_cpu_time().saturating_sub(before);
    // The call cannot have used more than its elapsed time on one thread.
    cpu.min(started.elapsed()).as_secs_f64() * 1e3
}

/// Opens as many events per vCPU as on a Golden Cove processor.
fn open_counters(vms: &[(ReservationId, Process)]) -> Result<Vec<Box<dyn ThreadCounters>>, Failure> {
    let event = EncodedEvent { name: "dummy", config: DUMMY_EVENT };
    let group = |count| EventGroup { kind: SOFTWARE, events: vec![event; count] };
    let groups = EVENTS_PER_GROUP.map(group);
    let mut opened = Vec::new();
    for (_, process) in vms {
        let threads = vcpu_threads(process.pid).map_err(Failure::file_error("list", "/proc/PID/task"))?;
        if threads.len() != VCPUS {
            return Err(unexpected("stand-in process", format!("{} vCPU threads", threads.len())));
        }
        for thread in threads {
            opened
                .push(PerfEvents.open(thread, &groups).map_err(Failure::file_error("open", "perf events"))?);
        }
    }
    Ok(opened)
}

fn start_damon(sampler: &mut PageSampler, process: &Process) -> Result<(), Failure> {
    let memfd = fs::read_dir(format!("/proc/{}/fd", process.pid)).into_iter().flatten().flatten();
    let memfd = memfd.map(|entry| entry.path()).find(|path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("tarn-stand-in"))
    });
    let path = memfd.ok_or_else(|| unexpected("stand-in process", "no memfd"))?;
    let file = FileId::of(&fs::metadata(&path).map_err(Failure::file_error("stat", &path))?);
    let failure = |error| unexpected("setup of DAMON", units::chain(&error));
    let _started = sampler.start(process, &[file].into()).map_err(failure)?;
    sampler.stop().map_err(|error| unexpected("setup of DAMON", units::chain(&error)))
}

/// Creates a simulated sysfs in which DAMON accepts all settings.
fn simulate_damon() -> Result<tempfile::TempDir, Failure> {
    let folder = tempfile::Builder::new().tempdir_in("/dev/shm");
    let folder = folder.map_err(Failure::file_error("create a folder in", "/dev/shm"))?;
    let write = |name: &str, text: &str| {
        let path = folder.path().join(KDAMONDS_FOLDER).join(name);
        let parent = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(parent).map_err(Failure::file_error("create", parent))?;
        fs::write(&path, text).map_err(Failure::file_error("write", &path))
    };
    write("nr_kdamonds", "0")?;
    write("0/state", "")?;
    let files = "nr_contexts 0/operations 0/monitoring_attrs/intervals/sample_us 0/monitoring_attrs/intervals/aggr_us \
        0/monitoring_attrs/intervals/update_us 0/monitoring_attrs/nr_regions/max 0/targets/nr_targets 0/targets/0/pid_target \
        0/targets/0/regions/nr_regions 0/schemes/nr_schemes 0/schemes/0/action 0/schemes/0/apply_interval_us \
        0/schemes/0/access_pattern/sz/min 0/schemes/0/access_pattern/sz/max 0/schemes/0/access_pattern/nr_accesses/min \
        0/schemes/0/access_pattern/nr_accesses/max 0/schemes/0/access_pattern/age/min 0/schemes/0/access_pattern/age/max";
    files.split_whitespace().try_for_each(|file| write(&format!("0/contexts/{file}"), ""))?;
    for region in 0..DAMON_REGIONS_MAX {
        for end in ["start", "end"] {
            write(&format!("0/contexts/0/targets/0/regions/{region}/{end}"), "")?;
        }
    }
    Ok(folder)
}
