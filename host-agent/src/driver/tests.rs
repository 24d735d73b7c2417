//! The driver with a host that fails on request, and a manager made of two channels.

use std::time::Duration;

use pool::{
    agent::HostFailure,
    protocol::{FailedReason, Have, Holding, Want, WantVm},
};
use units::{Bytes, Epoch, InstanceId, Revision, SliceId, UserId};

use super::*;
use crate::{
    host::{
        Usage,
        fake::{Call, Fake},
        process,
    },
    usage,
};

const SLICE_1: Holding = Holding { slice: SliceId(1), epoch: Epoch(1) };
const WITHIN: Duration = Duration::from_secs(20);

/// Where that slice is.
fn place() -> pool::protocol::Handle {
    pool::protocol::Handle::new("emc", "/emc/1.1")
}

struct Rig {
    host: Arc<Fake>,
    heard: mpsc::Sender<Heard>,
    driver: Handle,
    reports: Reports,
    /// All reports so far as one.
    told: Have,
    dir: tempfile::TempDir,
}

impl Rig {
    async fn new() -> Self {
        Self::with(Fake::default()).await
    }

    async fn with(host: Fake) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let left = host.found().unwrap();
        let host = Arc::new(host);
        let (sender, heard) = mpsc::channel(4);
        let start = Start {
            agent: Agent::new(Ns::ZERO, InstanceId(5), None, Vec::new(), left),
            host: Arc::clone(&host) as Arc<dyn Host>,
            records: Records::open(dir.path(), "boot").unwrap(),
            runtime_dir: RuntimeDir::take(dir.path()).unwrap(),
            metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "fake")),
            heard,
        };
        let (driver, handle, reports) = Driver::new(start).unwrap();
        tokio::spawn(driver.run());
        sender.send(Heard::Up { rack: "R".to_owned(), lease_ttl: Ns::secs(4) }).await.unwrap();
        Self { host, heard: sender, driver: handle, reports, told: Have::default(), dir }
    }

    async fn order(&self, revision: u64, change: impl FnOnce(&mut Want)) {
        let number = DesiredVersion { generation: 0, revision: Revision(revision) };
        let (base, vms, release, scrub, no_more) = Default::default();
        let instance = InstanceId(5);
        let mut want = Want { number, base, instance, vms, release, scrub, no_more, fenced: false };
        change(&mut want);
        self.heard.send(Heard::Want("R".to_owned(), want)).await.unwrap();
    }

    async fn order_vm(&self, revision: u64) {
        let slices = BTreeMap::from([(SLICE_1, place())]);
        let vm = WantVm { vm: name(), local: Bytes::mib(1), pinned: true, uid: None, slices };
        self.order(revision, |want| drop(want.vms.insert(ReservationId(1), vm))).await;
    }

    async fn wait(&mut self, is_right: impl Fn(&Have) -> bool) -> Have {
        while !is_right(&self.told) {
            let next = tokio::time::timeout(WITHIN, self.reports.have.next()).await;
            let next = next.expect("no report is right");
            self.told = std::mem::take(&mut self.told).followed_by(next);
        }
        self.told.clone()
    }

    async fn attach(&self) -> Result<Handed, Asked> {
        let process = process::identify(std::process::id()).unwrap();
        let caller = Caller { process, uid: UserId::ROOT };
        self.driver.attach(name(), caller, Form::Descriptors).await
    }
}

fn name() -> Name {
    Name::new("a").unwrap()
}

#[tokio::test]
async fn failed_online_is_retried() {
    let mut rig = Rig::new().await;
    rig.host.fail(Call::Online, 2);
    rig.order_vm(1).await;
    rig.wait(|have| have.online == [SLICE_1]).await;
    assert_eq!(rig.host.calls(), [(Call::Online, SLICE_1)]);
}

#[tokio::test]
async fn persistent_failure_is_reported_with_host_error() {
    let mut rig = Rig::new().await;
    rig.host.fail(Call::Scrub, 3);
    rig.order(1, |want| drop(want.scrub.insert(SLICE_1, place()))).await;
    let have = rig.wait(|have| !have.failed.is_empty()).await;
    let HostFailure { reason, message } =
        HostFailure { reason: have.failed[0].reason, message: have.failed[0].message.clone() };
    assert_eq!(reason, FailedReason::Host);
    assert!(message.contains("pretend with /emc/1.1"), "{message}");
    let have = rig.wait(|have| !have.scrubbed.is_empty()).await;
    assert!(have.failed.is_empty());
}

#[tokio::test]
async fn orphaned_slice_is_closed_before_host_is_clean() {
    let host = Fake::default();
    host.leave("/emc/1.1");
    host.leave("/emc/2.1");
    host.fail(Call::Clear, 2);
    let mut rig = Rig::with(host).await;
    rig.order_vm(1).await;
    let have = rig.wait(|have| have.online == [SLICE_1]).await;
    assert!(!have.clean);
    while rig.host.found().unwrap().iter().any(|place| **place == *"/emc/2.1") {
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.host.found().unwrap(), ["/emc/1.1".into()], "what is wanted is not closed");
}

#[tokio::test]
async fn dirty_slice_is_reported_and_not_retried() {
    let mut rig = Rig::new().await;
    rig.host.dirty(SLICE_1);
    rig.order_vm(1).await;
    let have = rig.wait(|have| !have.failed.is_empty()).await;
    assert_eq!(have.failed[0].reason, FailedReason::NotZero);
    assert!(rig.host.open().is_empty());
}

#[tokio::test]
async fn unrecorded_vm_gets_no_memory() {
    let mut rig = Rig::new().await;
    rig.order_vm(1).await;
    rig.wait(|have| have.online == [SLICE_1]).await;
    std::fs::remove_dir(rig.dir.path().join("vms")).unwrap();
    let refused = rig.attach().await.unwrap_err();
    assert!(matches!(refused, Asked::Refused(Refusal::NotRecorded { .. })), "{refused:?}");
    std::fs::create_dir(rig.dir.path().join("vms")).unwrap();
    let handed = rig.attach().await.unwrap();
    assert!(handed.pinned);
    assert_eq!(handed.parts.len(), 2);
    assert!(rig.dir.path().join("vms/r-1.json").exists());
}

#[tokio::test]
async fn failed_memory_request_is_reported_and_repeatable() {
    let mut rig = Rig::new().await;
    rig.order_vm(1).await;
    rig.wait(|have| have.online == [SLICE_1]).await;
    rig.host.fail(Call::Memory, 1);
    let error = units::chain(&rig.attach().await.unwrap_err());
    assert!(error.contains("its memory cannot be had: pretend with a"), "{error}");
    rig.attach().await.unwrap();
}

const USAGE: Usage = Usage { local: Some(Bytes::mib(1)), pool: Some(Bytes::mib(2)), overflow: None };

#[tokio::test]
async fn running_vm_is_measured() {
    let mut rig = Rig::new().await;
    rig.host.set_usage(ReservationId(1), USAGE);
    rig.order_vm(1).await;
    rig.wait(|have| have.online == [SLICE_1]).await;
    rig.attach().await.unwrap();
    let (driver, book) = (rig.driver.clone(), Arc::clone(&rig.reports.usage));
    let measuring = tokio::spawn(usage::keep_measuring(driver, Arc::clone(&rig.host) as _, book));
    while rig.reports.usage.all().is_empty() {
        tokio::task::yield_now().await;
    }
    measuring.abort();
    assert_eq!(rig.reports.usage.all(), [(ReservationId(1), USAGE)].into());
}

#[tokio::test]
async fn ended_vm_is_measured_before_its_end_is_reported() {
    let mut rig = Rig::new().await;
    rig.order_vm(1).await;
    rig.wait(|have| have.online == [SLICE_1]).await;
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let process = process::identify(child.id()).unwrap();
    rig.driver.attach(name(), Caller { process, uid: UserId::ROOT }, Form::Descriptors).await.unwrap();
    rig.host.set_usage(ReservationId(1), USAGE);
    child.kill().unwrap();
    child.wait().unwrap();
    rig.wait(|have| have.ended == [ReservationId(1)]).await;
    let touched = usage::Touched { local: Bytes::mib(1), pool: Bytes::mib(2) };
    assert_eq!(rig.reports.usage.take_news(), [(ReservationId(1), touched)]);
}

#[tokio::test]
async fn manager_of_another_rack_is_disconnected() {
    let mut rig = Rig::new().await;
    rig.wait(|have| have.clean).await;
    rig.heard.send(Heard::Down).await.unwrap();
    rig.heard.send(Heard::Up { rack: "Q".to_owned(), lease_ttl: Ns::secs(4) }).await.unwrap();
    tokio::time::timeout(WITHIN, rig.reports.hang_up.notified()).await.unwrap();
    assert_eq!(rig.reports.rack.borrow().as_deref(), Some("R"));
}
