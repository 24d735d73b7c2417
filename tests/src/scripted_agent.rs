//! Scripted agents: a session with the manager in which a test sends any message, and an agent that
//! applies desired states on a simulated host.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use proto::v1::{
    self as wire, agent_client::AgentClient, from_agent::Message as Up, to_agent::Message as Down,
};
use tokio::{sync::mpsc, task::JoinHandle, time::interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};

use crate::rack::Rack;

/// Interval of an agent's heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(200);

/// One connection.
#[derive(Debug)]
pub struct Session {
    /// Up.
    pub says: mpsc::Sender<wire::FromAgent>,
    /// Down.
    pub hears: Streaming<wire::ToAgent>,
}

/// As the newest instance of a host's agent would introduce itself.
pub fn hello(host: &str) -> wire::Hello {
    wire::Hello {
        protocol_version: proto::PROTOCOL_VERSION,
        host: host.into(),
        boot_id: "boot".into(),
        instance: u64::MAX,
        ..Default::default()
    }
}

/// Objects that the manager created for a host.
pub fn token(rack: &Rack, host: &str) -> String {
    let path = rack.dir().join(format!("store/tokens/{host}.token"));
    std::fs::read_to_string(path).expect("the manager made it").trim().to_owned()
}

impl Session {
    /// Introduces itself.
    ///
    /// # Errors
    /// The manager does not let it in.
    pub async fn connect(rack: &Rack, token: &str, hello: wire::Hello) -> Result<Self, Status> {
        let (says, said) = mpsc::channel(4);
        let hello = wire::FromAgent { message: Some(Up::Hello(hello)) };
        says.send(hello).await.expect("its other end is here");
        let mut request = Request::new(ReceiverStream::new(said));
        let bearer = format!("Bearer {token}").parse().expect("a token is plain text");
        request.metadata_mut().insert("authorization", bearer);
        let hears = AgentClient::new(rack.any_client().await).session(request).await?.into_inner();
        Ok(Self { says, hears })
    }
}

/// Shared device.
pub const SERIAL: &str = "0x1a";
/// How many slices it has.
pub const SLICES: u32 = 4;

/// Agent that applies every desired state at once, until it is dropped.
#[derive(Debug)]
pub struct Obedient {
    task: JoinHandle<()>,
    handles: Arc<Mutex<BTreeSet<String>>>,
}

impl Obedient {
    /// Connects for a host in its `boot`-th boot, which sees [`SERIAL`].
    pub async fn start(rack: &Rack, host: &str, boot: &str) -> Self {
        let seen = wire::SeenDevice { serial: SERIAL.into(), slices: SLICES, problem: None };
        let hello = wire::Hello { boot_id: boot.into(), devices: vec![seen], ..hello(host) };
        let session = Session::connect(rack, &token(rack, host), hello).await.expect("its token is right");
        let handles = Arc::default();
        let task = tokio::spawn(obey(session, Arc::clone(&handles)));
        Self { task, handles }
    }

    /// Locations that it brought online.
    pub fn handles(&self) -> BTreeSet<String> {
        self.handles.lock().expect("nobody panics with it").clone()
    }
}

impl Drop for Obedient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn obey(mut session: Session, handles: Arc<Mutex<BTreeSet<String>>>) {
    let (mut beat, mut have) =
        (interval(HEARTBEAT), wire::ObservedState { instance: u64::MAX, ..Default::default() });
    loop {
        tokio::select! {
            _ = beat.tick() => {}
            heard = session.hears.message() => match heard {
                Ok(Some(wire::ToAgent { message: Some(Down::Desired(want)) })) => {
                    let places = want.vms.iter().flat_map(|vm| &vm.slices).map(|slice| slice.handle.clone());
                    handles.lock().expect("nobody panics with it").extend(places);
                    have = answer(want);
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
        let said = wire::FromAgent { message: Some(Up::Observed(have.clone())) };
        if session.says.send(said).await.is_err() {
            return;
        }
    }
}

fn answer(want: wire::DesiredState) -> wire::ObservedState {
    let slices = want.vms.iter().flat_map(|vm| &vm.slices);
    let scrubbed = want.scrub.iter().map(|s| wire::ScrubResult {
        slice: s.slice,
        epoch: s.epoch,
        bytes_verified: 1 << 30,
        ..Default::default()
    });
    let released = want.release.iter();
    wire::ObservedState {
        instance: want.instance,
        generation: want.generation,
        revision: want.revision,
        online: slices.map(|s| wire::SliceEpoch { slice: s.slice, epoch: s.epoch }).collect(),
        released: released.map(|r| wire::SliceEpoch { slice: r.slice, epoch: r.epoch }).collect(),
        scrubbed: scrubbed.collect(),
        clean: want.fenced,
        ..Default::default()
    }
}
