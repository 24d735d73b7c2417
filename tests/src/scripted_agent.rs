//! Scripted agents for tests: [`Session`] lets a test send any message to the manager.
//! [`ScriptedAgent`] applies desired states on a simulated host.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use proto::v1::{
    self as wire, agent_client::AgentClient, from_agent::Message as Up, to_agent::Message as Down,
};
use tokio::{sync::mpsc, task::JoinHandle, time::interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};

use crate::rack::Rack;

/// Interval between the heartbeats of a scripted agent.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);

/// Session of an agent with the manager.
#[derive(Debug)]
pub struct Session {
    /// Messages to the manager.
    pub outgoing: mpsc::Sender<wire::FromAgent>,
    /// Messages from the manager.
    pub incoming: Streaming<wire::ToAgent>,
}

/// Returns the hello message of an agent with the highest instance number.
pub fn hello_message(host: &str) -> wire::Hello {
    wire::Hello {
        protocol_version: proto::PROTOCOL_VERSION,
        host: host.into(),
        boot_id: "boot".into(),
        instance: u64::MAX,
        ..Default::default()
    }
}

/// Reads the token that the manager created for a host.
pub fn read_token(rack: &Rack, host: &str) -> String {
    let path = rack.dir().join(format!("store/tokens/{host}.token"));
    std::fs::read_to_string(path).expect("the manager created the token").trim().to_owned()
}

impl Session {
    /// Connects to the manager and sends a hello message.
    ///
    /// # Errors
    /// Returns the status of the manager if the manager rejects the session.
    pub async fn connect(rack: &Rack, token: &str, hello: wire::Hello) -> Result<Self, Status> {
        let (outgoing, receiver) = mpsc::channel(4);
        let hello = wire::FromAgent { message: Some(Up::Hello(hello)) };
        outgoing.send(hello).await.expect("the receiver exists");
        let mut request = Request::new(ReceiverStream::new(receiver));
        let bearer = format!("Bearer {token}").parse().expect("a token is plain text");
        request.metadata_mut().insert("authorization", bearer);
        let incoming = AgentClient::new(rack.open_channel().await).session(request).await?.into_inner();
        Ok(Self { outgoing, incoming })
    }
}

/// Serial number of the shared device that scripted agents report.
pub const DEVICE_SERIAL: &str = "0x1a";
/// Number of slices of the shared device.
pub const DEVICE_SLICES: u32 = 4;

/// Agent that applies every desired state immediately, also moves of VMs to local memory. Dropping the
/// value disconnects the agent.
#[derive(Debug)]
pub struct ScriptedAgent {
    task: JoinHandle<()>,
    outgoing: mpsc::Sender<wire::FromAgent>,
    handles: Arc<Mutex<BTreeSet<String>>>,
    behavior: Arc<Behavior>,
}

/// What a scripted agent does. Tests change it while the agent runs.
#[derive(Debug, Default)]
struct Behavior {
    /// Reports a process for each VM.
    runs_vms: AtomicBool,
    /// Reports that moves to local memory have failed.
    fails_moves: AtomicBool,
}

impl ScriptedAgent {
    /// Connects as the agent of a host with this boot id. The host has the device
    /// [`DEVICE_SERIAL`].
    pub async fn start(rack: &Rack, host: &str, boot: &str) -> Self {
        let device = wire::SeenDevice { serial: DEVICE_SERIAL.into(), slices: DEVICE_SLICES, problem: None };
        let (boot_id, devices) = (boot.into(), vec![device]);
        let hello = wire::Hello { boot_id, devices, can_rehome: true, ..hello_message(host) };
        let session =
            Session::connect(rack, &read_token(rack, host), hello).await.expect("the token is valid");
        let (handles, behavior, outgoing) = (Arc::default(), Arc::default(), session.outgoing.clone());
        let task = tokio::spawn(run_agent(session, Arc::clone(&handles), Arc::clone(&behavior)));
        Self { task, outgoing, handles, behavior }
    }

    /// Reports a process for each VM from now on.
    pub fn run_vms(&self) {
        self.behavior.runs_vms.store(true, Ordering::Relaxed);
    }

    /// Reports from now on that each move of a VM to local memory has failed.
    pub fn fail_moves(&self) {
        self.behavior.fails_moves.store(true, Ordering::Relaxed);
    }

    /// Sends samples of running VMs.
    pub async fn send_samples(&self, samples: Vec<wire::VmSample>) {
        let samples = Up::Samples(wire::VmSamples { samples });
        let message = wire::FromAgent { message: Some(samples) };
        self.outgoing.send(message).await.expect("the session is open");
    }

    /// Returns the handles of all slices that the agent has brought online.
    pub fn handles(&self) -> BTreeSet<String> {
        self.handles.lock().expect("no thread panicked with this lock").clone()
    }
}

impl Drop for ScriptedAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run_agent(mut session: Session, handles: Arc<Mutex<BTreeSet<String>>>, behavior: Arc<Behavior>) {
    let (mut heartbeat, mut observed) =
        (interval(HEARTBEAT_INTERVAL), wire::ObservedState { instance: u64::MAX, ..Default::default() });
    let mut vms = Vec::new();
    loop {
        tokio::select! {
            _ = heartbeat.tick() => {}
            received = session.incoming.message() => match received {
                Ok(Some(wire::ToAgent { message: Some(Down::Desired(desired)) })) => {
                    let handles_of_vms = desired.vms.iter().flat_map(|vm| &vm.slices).map(|slice| slice.handle.clone());
                    handles.lock().expect("no thread panicked with this lock").extend(handles_of_vms);
                    vms = desired.vms.iter().map(|vm| run_vm(vm, behavior.fails_moves.load(Ordering::Relaxed))).collect();
                    observed = to_observed_state(desired);
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
        let vms = if behavior.runs_vms.load(Ordering::Relaxed) { vms.clone() } else { Vec::new() };
        let observed = wire::ObservedState { vms, ..observed.clone() };
        let message = wire::FromAgent { message: Some(Up::Observed(observed)) };
        if session.outgoing.send(message).await.is_err() {
            return;
        }
    }
}

/// Returns the report of a VM that runs. If the manager has requested a move of its memory, the move is
/// complete or has failed.
fn run_vm(vm: &wire::DesiredVm, fails_moves: bool) -> wire::ObservedVm {
    let pool_bytes = (vm.slices.len() as u64) << 30;
    let rehomed = vm.rehome_attempt.is_some() && !fails_moves;
    let failure = |attempt| wire::RehomeFailure { attempt, reason: "the test fails moves".into() };
    let slices = vm.slices.iter().map(|s| wire::SliceEpoch { slice: s.slice, epoch: s.epoch });
    wire::ObservedVm {
        vm: vm.vm.clone(),
        pid: 1,
        slices: if rehomed { Vec::new() } else { slices.collect() },
        reservation: vm.reservation.clone(),
        local_bytes: vm.local_bytes + if rehomed { pool_bytes } else { 0 },
        rehomed,
        rehome_failure: vm.rehome_attempt.filter(|_| fails_moves).map(failure),
        ..Default::default()
    }
}

fn to_observed_state(desired: wire::DesiredState) -> wire::ObservedState {
    let slices = desired.vms.iter().flat_map(|vm| &vm.slices);
    let scrubbed = desired.scrub.iter().map(|s| wire::ScrubResult {
        slice: s.slice,
        epoch: s.epoch,
        bytes_verified: 1 << 30,
        ..Default::default()
    });
    let released = desired.release.iter();
    wire::ObservedState {
        instance: desired.instance,
        generation: desired.generation,
        revision: desired.revision,
        online: slices.map(|s| wire::SliceEpoch { slice: s.slice, epoch: s.epoch }).collect(),
        released: released.map(|r| wire::SliceEpoch { slice: r.slice, epoch: r.epoch }).collect(),
        scrubbed: scrubbed.collect(),
        clean: desired.fenced,
        ..Default::default()
    }
}
