//! Test rig: a rack of one host with the real `host-agent` and VMMs as processes, and a fake
//! manager.
#![expect(clippy::unwrap_used, reason = "a failed setup fails the test")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use proto::v1::{self as wire, agent_server, from_agent, to_agent};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};
use tokio_stream::{
    Stream,
    wrappers::{TcpListenerStream, UnboundedReceiverStream},
};
use tonic::{Request, Response, Status, Streaming};

/// Time limit for each expected event.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// UUID of the rack.
pub const RACK: &str = "rack-of-one";
const SLICE: u64 = 1 << 30;

/// Events of the fake manager.
#[derive(Debug)]
pub enum ManagerEvent {
    /// An agent connected: its hello, its authorization header, and the channel to it.
    Hello(wire::Hello, Option<String>, UnboundedSender<to_agent::Message>),
    /// An agent sent a report.
    Report(wire::ObservedState),
}

#[derive(Clone)]
struct FakeManager(UnboundedSender<ManagerEvent>);

#[tonic::async_trait]
impl agent_server::Agent for FakeManager {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<wire::ToAgent, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<wire::FromAgent>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let bearer = request.metadata().get("authorization").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let mut messages = request.into_inner();
        let Some(from_agent::Message::Hello(hello)) = messages.message().await?.and_then(|m| m.message)
        else {
            return Err(Status::invalid_argument("no hello"));
        };
        let (sender, mut to_send) = unbounded_channel::<to_agent::Message>();
        let (out, stream) = unbounded_channel();
        let welcome = wire::Welcome {
            protocol_version: proto::PROTOCOL_VERSION,
            rack_uuid: RACK.to_owned(),
            lease_ttl_ms: 2000,
            generation: 1,
            election: 0,
        };
        let down = |message| Ok(wire::ToAgent { message: Some(message) });
        out.send(down(to_agent::Message::Welcome(welcome))).expect("the receiver exists");
        out.send(down(to_agent::Message::Weights(wire::Weights::default()))).expect("the receiver exists");
        let events = self.0.clone();
        let _ = events.send(ManagerEvent::Hello(hello, bearer, sender)); // fails if the test has ended
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    message = to_send.recv() => match message {
                        Some(message) => drop(out.send(down(message))),
                        None => return, // the rig ends the session
                    },
                    message = messages.message() => match message {
                        Ok(Some(wire::FromAgent { message: Some(from_agent::Message::Observed(report)) })) => {
                            let _ = events.send(ManagerEvent::Report(report)); // fails if the test has ended
                        }
                        _ => return,
                    },
                }
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(stream))))
    }
}

/// Rack of one host, which is stopped when the value is dropped.
pub struct Rig {
    pub dir: tempfile::TempDir,
    /// Token of host h0. Each rack has another one, because agents with the same token exclude each
    /// other.
    pub token: String,
    runtime: Runtime,
    events: UnboundedReceiver<ManagerEvent>,
    agent: Option<Child>,
    /// Channel to the connected agent.
    to_agent: Option<UnboundedSender<to_agent::Message>>,
    /// Last hello of the agent.
    pub hello: wire::Hello,
    /// Authorization header of the last session, `Bearer TOKEN`.
    pub bearer: Option<String>,
    revision: u64,
    /// Slices that were reported as online and not yet as released, as slice and epoch.
    online: std::collections::BTreeSet<(u32, u64)>,
}

impl Rig {
    /// Starts a manager and an agent.
    pub fn new() -> Self {
        Self::with("")
    }

    /// Starts a manager and an agent, with additional lines in section `[agent]` of host.toml.
    pub fn with(more: &str) -> Self {
        let mut rig = Self::without_agent(more);
        rig.start_agent();
        rig
    }

    pub fn without_agent(more: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("tarn-agent-").tempdir_in("/dev/shm").unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (sender, events) = unbounded_channel();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(agent_server::AgentServer::new(FakeManager(sender)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        runtime.spawn(server);
        // VMMs of other users must reach the socket and the slices in this directory.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let token = format!("0123456789abcdef{}", dir.path().display());
        write_config(dir.path(), &token, &format!("manager = \"http://{address}\"\n{more}"));
        let hello = wire::Hello::default();
        let online = std::collections::BTreeSet::new();
        let bearer = None;
        Self { dir, token, runtime, events, agent: None, to_agent: None, hello, bearer, revision: 0, online }
    }

    pub fn config(&self) -> PathBuf {
        self.dir.path().join("host.toml")
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("agent.log")
    }

    /// Returns the log of all agents of this rig.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("run/host-memory.sock")
    }

    /// Starts an agent, and waits until it connects.
    pub fn start_agent(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path()).unwrap();
        self.agent = Some(serve(&self.config()).stderr(log).spawn().unwrap());
        self.wait_for_hello();
    }

    /// Disconnects the agent, and waits until it connects again.
    pub fn disconnect_agent(&mut self) {
        self.to_agent = None;
        self.wait_for_hello();
    }

    fn wait_for_hello(&mut self) {
        let (hello, bearer, to_agent) = loop {
            if let ManagerEvent::Hello(hello, bearer, to_agent) = self.next_event() {
                break (hello, bearer, to_agent);
            }
        };
        (self.hello, self.bearer, self.to_agent) = (hello, bearer, Some(to_agent));
    }

    pub fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("the agent runs");
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Stops the agent by SIGTERM, like a service manager.
    pub fn terminate_agent(&mut self) -> ExitStatus {
        let mut agent = self.agent.take().expect("the agent runs");
        let pid = rustix::process::Pid::from_child(&agent);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        agent.wait().unwrap()
    }

    fn next_event(&mut self) -> ManagerEvent {
        let events = &mut self.events;
        let next = self.runtime.block_on(async { tokio::time::timeout(TIMEOUT, events.recv()).await });
        next.expect("no message of the agent within the time limit").expect("the manager ended")
    }

    /// Sends a desired state, and waits for a report on it that meets the condition.
    #[track_caller]
    pub fn apply(
        &mut self,
        desired_state: wire::DesiredState,
        is_expected: impl Fn(&wire::ObservedState) -> bool,
    ) -> wire::ObservedState {
        self.send_state(desired_state);
        self.wait(is_expected)
    }

    /// Sends a desired state with the next revision.
    pub fn send_state(&mut self, desired_state: wire::DesiredState) {
        self.revision += 1;
        let desired_state = wire::DesiredState {
            rack_uuid: RACK.to_owned(),
            generation: 1,
            revision: self.revision,
            instance: self.hello.instance,
            ..desired_state
        };
        self.send(to_agent::Message::Desired(desired_state));
    }

    fn send(&self, message: to_agent::Message) {
        self.to_agent.as_ref().expect("an agent has connected").send(message).expect("the session runs");
    }

    /// Waits until a report on the latest desired state meets the condition. Requests a complete
    /// report after each incomplete one.
    #[track_caller]
    pub fn wait(&mut self, is_expected: impl Fn(&wire::ObservedState) -> bool) -> wire::ObservedState {
        let until = Instant::now() + TIMEOUT;
        let mut last = None;
        while Instant::now() < until {
            if let ManagerEvent::Report(report) = self.next_event() {
                let report = self.with_reported_slices(report);
                if report.revision >= self.revision && is_expected(&report) {
                    return report;
                }
                if !report.complete {
                    self.send(to_agent::Message::ReportRequest(wire::ReportRequest {}));
                }
                last = Some(report);
            }
        }
        panic!("no report meets the condition; the last report is {last:?}");
    }

    /// Replaces the online slices of a report by all slices that are online according to this
    /// report and earlier reports.
    fn with_reported_slices(&mut self, mut report: wire::ObservedState) -> wire::ObservedState {
        if report.complete || report.clean {
            self.online.clear();
        }
        self.online.extend(slice_epochs(&report.online));
        for released in &report.released {
            self.online.remove(&(released.slice, released.epoch));
        }
        report.online = self.online.iter().map(|&(slice, epoch)| wire::SliceEpoch { slice, epoch }).collect();
        report
    }

    /// Creates the file of a slice like an emulated EMC: a sparse file of 1 GiB.
    pub fn create_slice(&self, slice: u32, epoch: u64) -> wire::DesiredSlice {
        let path = self.slice_path(slice, epoch);
        fs::File::create_new(&path).unwrap().set_len(SLICE).unwrap();
        self.desired_slice(slice, epoch)
    }

    pub fn desired_slice(&self, slice: u32, epoch: u64) -> wire::DesiredSlice {
        let handle = self.slice_path(slice, epoch).to_str().unwrap().to_owned();
        wire::DesiredSlice { slice, epoch, handle, emc: "emc0".into() }
    }

    pub fn slice_path(&self, slice: u32, epoch: u64) -> PathBuf {
        self.dir.path().join("slices").join(format!("{slice:05}.{epoch}.h0"))
    }

    pub fn vmm(&self) -> Vmm {
        Vmm::new(&self.socket(), &[])
    }

    /// Starts a VMM that becomes this user before it connects to the agent.
    pub fn vmm_of(&self, uid: u32) -> Vmm {
        Vmm::new(&self.socket(), &["before", &uid.to_string()])
    }

    /// Starts a VMM that connects as root and then becomes this user, like `vmm-plugin run --uid`.
    pub fn vmm_switching_to(&self, uid: u32) -> Vmm {
        Vmm::new(&self.socket(), &["after", &uid.to_string()])
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill(); // the agent may have ended
            let _ = agent.wait();
        }
    }
}

pub fn serve(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host-agent"));
    command.arg("serve").arg("--config").arg(config).stdin(Stdio::null());
    command
}

fn write_config(dir: &Path, token: &str, agent: &str) {
    fs::create_dir(dir.join("slices")).unwrap();
    let token_file = dir.join("token");
    fs::write(&token_file, token).unwrap();
    fs::set_permissions(&token_file, fs::Permissions::from_mode(0o600)).unwrap();
    let text = format!(
        "[agent]\nhost = \"h0\"\nruntime_dir = \"run\"\ntoken_file = \"token\"\n{agent}\n\
         [backend]\nkind = \"emulated\"\nlocal_dir = \"local\"\n"
    );
    fs::write(dir.join("host.toml"), text).unwrap();
}

pub fn desired_state() -> wire::DesiredState {
    wire::DesiredState::default()
}

/// Returns the desired state of one VM `a` with reservation r-1.
pub fn desired_vm(slices: Vec<wire::DesiredSlice>) -> wire::DesiredState {
    let vm = wire::DesiredVm {
        vm: "a".to_owned(),
        reservation: "r-1".to_owned(),
        local_bytes: 16 << 20,
        slices,
        pinned: false,
        uid: None,
        rehome_attempt: None,
        rehome_cancelled: false,
    };
    wire::DesiredState { vms: vec![vm], ..desired_state() }
}

/// Returns the desired state of VMs `a`, `b`, ... with reservations r-1, r-2, ..., each with one
/// slice and a user.
pub fn desired_vms(vms: impl IntoIterator<Item = (wire::DesiredSlice, Option<u32>)>) -> wire::DesiredState {
    let vms = ('a'..).zip(1..).zip(vms).map(|((vm, number), (slice, uid))| wire::DesiredVm {
        vm: vm.to_string(),
        reservation: format!("r-{number}"),
        local_bytes: 16 << 20,
        slices: vec![slice],
        pinned: false,
        uid,
        rehome_attempt: None,
        rehome_cancelled: false,
    });
    wire::DesiredState { vms: vms.collect(), ..desired_state() }
}

pub fn release_state(slice: u32, epoch: u64, force: bool) -> wire::DesiredState {
    wire::DesiredState {
        release: vec![wire::DesiredRelease { slice, epoch, force, handle: String::new() }],
        ..desired_state()
    }
}

pub fn slice_epochs(holdings: &[wire::SliceEpoch]) -> Vec<(u32, u64)> {
    holdings.iter().map(|holding| (holding.slice, holding.epoch)).collect()
}

/// VMM process without a guest, which is killed when the value is dropped.
pub struct Vmm {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Vmm {
    fn new(socket: &Path, user: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host-agent-test-vmm"));
        let mut process =
            command.arg(socket).args(user).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, stdin, stdout: BufReader::new(stdout) }
    }

    /// Sends a request, and returns the reply.
    pub fn request(&mut self, words: &str) -> String {
        writeln!(self.stdin, "{words}").unwrap();
        let mut reply = String::new();
        self.stdout.read_line(&mut reply).unwrap();
        reply.trim_end().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills the process without waiting for it, so that it becomes a zombie.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
    }

    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill(); // the process may have ended
        let _ = self.process.wait();
    }
}
