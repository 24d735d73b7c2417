//! Throughput of a guest with and without sampling: rounds per time in which its vCPU was not waiting
//! for a processor. Other processes of the machine thus do not count as a loss.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use benches::{failure::Failure, report::Rounds};
use host_agent::{
    host::{process::identify_process, sysfs::Sysfs, vm_counters::list_threads},
    metrics::Metrics,
    sampling::Measurements,
    vmm_client::VmmClient,
};
use pool::agent::Process;
use proto::v1 as wire;
use tests::{
    rack::{Plan, Rack, programs_dir, reserve_request, vm_ref},
    small_guests,
    standalone_vm::confine_command,
};
use units::{Name, ReservationId};

/// Name of the VM.
const VM: &str = "busy";
/// Time after which the guest has touched all its memory.
const WARM_UP_TIME: Duration = Duration::from_secs(10);
/// Interval between two checks for the end of a round of the guest.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// 95 % quantile of the standard normal distribution.
const Z_95: f64 = 1.644_854;

/// Loss of throughput in percent, one value per pair.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    rounds: Rounds,
    values: Vec<f64>,
}

impl Losses {
    fn add(&mut self, without: f64, with: f64) {
        let loss = (1.0 - with / without) * 100.0;
        self.rounds.add(loss);
        self.values.push(loss);
    }

    fn mean(&self) -> f64 {
        self.values.iter().sum::<f64>() / count(&self.values)
    }

    /// Returns the upper end of the one-sided 95 % confidence interval of the mean (Student's
    /// distribution).
    pub(crate) fn upper_bound(&self) -> f64 {
        let (mean, n) = (self.mean(), count(&self.values));
        let squares: f64 = self.values.iter().map(|loss| (loss - mean).powi(2)).sum();
        let error = (squares / (n - 1.0) / n).sqrt();
        // Expansion of the quantile by the degrees of freedom (Abramowitz and Stegun 26.7.5).
        let t = Z_95 + (Z_95.powi(3) + Z_95) / (4.0 * (n - 1.0));
        mean + t * error
    }

    /// Formats the losses as a row of a table.
    pub(crate) fn row(&self) -> Vec<String> {
        let number = |value: f64| format!("{value:.2}");
        let (mean, bound) = (number(self.mean()), number(self.upper_bound()));
        vec!["with sampling".to_owned(), self.values.len().to_string(), mean, bound, self.rounds.spread(2)]
    }
}

#[expect(clippy::cast_precision_loss, reason = "the number of pairs is small")]
fn count(values: &[f64]) -> f64 {
    values.len() as f64
}

/// Guest that writes to all its pool memory in a loop, and prints a byte after each round.
struct Guest {
    child: Child,
    console: PathBuf,
    process: Process,
    /// Identifier of the vCPU thread.
    vcpu: u32,
}

impl Guest {
    async fn start(rack: &Rack) -> Result<Self, Failure> {
        let (kernel, console) = (rack.dir().join("kernel"), rack.dir().join("console"));
        fs::write(&kernel, small_guests::sweep_pool_memory())
            .map_err(Failure::file_error("write", &kernel))?;
        let program = programs_dir().join("vmm-plugin");
        let mut command = Command::new(&program);
        confine_command(command.arg("run"));
        command.args(["--vm", VM, "--agent"]).arg(rack.host_memory_socket(0)).arg("--kernel").arg(kernel);
        command.arg("--serial").arg(format!("file={}", console.display()));
        command.arg("--run-dir").arg(rack.dir().join("run")).stdin(Stdio::null());
        let child = command.spawn().map_err(|source| Failure::Start { program, source })?;
        let process = identify_process(child.id()).map_err(|error| unexpected("identify the VMM", &error))?;
        tokio::time::sleep(WARM_UP_TIME).await;
        let threads = list_threads(process.pid).map_err(Failure::file_error("list", "/proc/PID/task"))?;
        let vcpu = threads.iter().find(|thread| thread.is_vcpu());
        let vcpu = vcpu.ok_or_else(|| Failure::UnexpectedReply {
            subject: "VMM".to_owned(),
            reply: format!("no vCPU thread among {threads:?}"),
        })?;
        Ok(Self { child, console, process, vcpu: vcpu.id })
    }

    /// Returns the number of rounds so far.
    fn rounds(&self) -> Result<u64, Failure> {
        let metadata = fs::metadata(&self.console).map_err(Failure::file_error("stat", &self.console))?;
        Ok(metadata.len())
    }

    /// Returns the time for which the vCPU thread has waited for a processor.
    fn wait_time(&self) -> Result<Duration, Failure> {
        let path = format!("/proc/{}/task/{}/schedstat", self.process.pid, self.vcpu);
        let text = fs::read_to_string(&path).map_err(Failure::file_error("read", &path))?;
        let waited = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
        waited.map(Duration::from_nanos).ok_or(Failure::UnexpectedReply { subject: path, reply: text })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn unexpected(subject: &str, error: &dyn std::error::Error) -> Failure {
    Failure::UnexpectedReply { subject: subject.to_owned(), reply: units::chain(error) }
}

/// Sampler like the one of the agent, for one VM. It connects to the VMM for each sample.
struct Sampler {
    socket: PathBuf,
    measurements: Measurements,
    process: Process,
    interval: Duration,
}

impl Sampler {
    fn new(guest: &Guest, run_dir: &Path, interval: Duration) -> Result<Self, Failure> {
        let metrics = Arc::new(Metrics::new(&Name::new("h0").expect("a valid name"), "bench"));
        let measurements = Measurements::new(&Sysfs::at("/sys"), metrics);
        Ok(Self { socket: find_socket(run_dir)?, measurements, process: guest.process.clone(), interval })
    }

    async fn sample(&mut self) -> Result<wire::SampleAccessResponse, Failure> {
        let id = ReservationId(1);
        self.measurements.sample(&[(id, self.process.clone())], &[id].into());
        let client = VmmClient::connect(self.socket.clone(), self.process.clone()).await;
        let mut client = client.map_err(|error| unexpected("connect to the VMM", &error))?;
        client.sample_access().await.map_err(|error| unexpected("sample accesses", &error))
    }
}

/// Finds the control socket of the only VM in the folder of control sockets.
fn find_socket(run_dir: &Path) -> Result<PathBuf, Failure> {
    let entries = fs::read_dir(run_dir).map_err(Failure::file_error("list", run_dir))?;
    let socket = entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "sock"));
    socket.ok_or_else(|| Failure::UnexpectedReply {
        subject: "find the control socket".to_owned(),
        reply: format!("no socket in {}", run_dir.display()),
    })
}

/// Measures the throughput in pairs of periods with and without sampling at an interval. Returns `None` if the
/// machine cannot run guests.
pub(crate) async fn measure(
    pairs: u32,
    period: Duration,
    interval: Duration,
) -> Result<Option<Losses>, Failure> {
    if !small_guests::can_run_small_guests() {
        return Ok(None);
    }
    // The agent does not sample: this program does, in the periods with sampling.
    let agent_toml_extra = "sample_interval_s = \"never\"\n".to_owned();
    let rack = Rack::start(Plan { agent_toml_extra, ..Plan::small(4) }).await;
    let request =
        wire::ReserveRequest { local_bytes: 64 << 20, wait_ready: true, ..reserve_request("h0", VM, 1, VM) };
    let mut scheduler = rack.scheduler().await;
    scheduler.reserve(request).await.map_err(Failure::rejection("reserve a slice"))?;
    let commit = wire::CommitRequest { target: vm_ref(VM) };
    scheduler.commit(commit).await.map_err(Failure::rejection("commit a reservation"))?;
    let guest = Guest::start(&rack).await?;
    let mut sampler = Sampler::new(&guest, &rack.dir().join("run"), interval)?;
    let mut losses = Losses::default();
    for pair in 0..pairs {
        // The order alternates, so that a trend of the machine's speed has no effect.
        let (without, with) = if pair % 2 == 0 {
            let without = throughput(&guest, None, period).await?;
            (without, throughput(&guest, Some(&mut sampler), period).await?)
        } else {
            let with = throughput(&guest, Some(&mut sampler), period).await?;
            (throughput(&guest, None, period).await?, with)
        };
        losses.add(without, with);
    }
    Ok(Some(losses))
}

/// Returns the rounds of the guest per second in a period, between the ends of the first and the
/// last round, without the time in which the vCPU waited for a processor.
async fn throughput(
    guest: &Guest,
    mut sampler: Option<&mut Sampler>,
    period: Duration,
) -> Result<f64, Failure> {
    let (started, waited) = (Instant::now(), guest.wait_time()?);
    let (mut rounds, mut ends) = (guest.rounds()?, Vec::new());
    let mut next_sample = Duration::ZERO;
    while started.elapsed() < period {
        if let Some(sampler) = sampler.as_deref_mut().filter(|_| started.elapsed() >= next_sample) {
            next_sample += sampler.interval;
            sampler.sample().await?;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = guest.rounds()?;
        if now > rounds {
            let waited = guest.wait_time()?.saturating_sub(waited);
            ends.push((started.elapsed().saturating_sub(waited), now));
            rounds = now;
        }
    }
    match (ends.first(), ends.last()) {
        (Some(first), Some(last)) if last.1 > first.1 => {
            let rounds = u32::try_from(last.1 - first.1).unwrap_or(u32::MAX);
            Ok(f64::from(rounds) / last.0.saturating_sub(first.0).as_secs_f64())
        }
        _ => Err(Failure::UnexpectedReply {
            subject: "guest".to_owned(),
            reply: format!("fewer than two rounds in {period:?}"),
        }),
    }
}
