//! Tests of the driver with a fake host that can inject failures, and a manager that is simulated
//! by two channels.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use pool::{
    agent::HostFailure,
    protocol::{DesiredState, DesiredVm, FailureReason, Holding, ObservedState},
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
    usage_table::TouchedMemory,
};

const SLICE_1: Holding = Holding { slice: SliceId(1), epoch: Epoch(1) };
const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the handle of `SLICE_1`.
fn slice_handle() -> pool::protocol::Handle {
    pool::protocol::Handle::new("emc", "/emc/1.1")
}

struct Rig {
    host: Arc<Fake>,
    session: mpsc::Sender<SessionEvent>,
    driver: Handle,
    reports: ReportStream,
    /// Merge of all reports so far.
    reported: ObservedState,
    dir: tempfile::TempDir,
}

impl Rig {
    async fn new() -> Self {
        Self::with(Fake::default()).await
    }

    async fn with(host: Fake) -> Self {
        let rig = Self::start_disconnected(host);
        rig.connect().await;
        rig
    }

    /// Starts a driver without a manager.
    fn start_disconnected(host: Fake) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let orphans = host.present_slices().unwrap();
        let host = Arc::new(host);
        let (sender, session_events) = mpsc::channel(4);
        let inputs = DriverInputs {
            agent: Agent::new(Ns::ZERO, InstanceId(5), None, Vec::new(), orphans),
            host: Arc::clone(&host) as Arc<dyn Host>,
            records: Records::open(dir.path(), "boot").unwrap(),
            runtime_dir: RuntimeDir::lock(dir.path()).unwrap(),
            metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "fake")),
            session_events,
        };
        let (driver, handle, reports) = Driver::new(inputs).unwrap();
        tokio::spawn(driver.run());
        Self { host, session: sender, driver: handle, reports, reported: ObservedState::default(), dir }
    }

    async fn connect(&self) {
        let connected = SessionEvent::Connected { rack: "R".to_owned(), lease_ttl: Ns::secs(4) };
        self.session.send(connected).await.unwrap();
    }

    async fn send_state(&self, revision: u64, change: impl FnOnce(&mut DesiredState)) {
        let number = DesiredVersion { generation: 0, revision: Revision(revision) };
        let (base, vms, release, scrub, removals) = Default::default();
        let instance = InstanceId(5);
        let mut desired =
            DesiredState { number, base, instance, vms, release, scrub, removals, fenced: false };
        change(&mut desired);
        self.session.send(SessionEvent::DesiredState("R".to_owned(), desired)).await.unwrap();
    }

    async fn send_vm(&self, revision: u64) {
        let slices = BTreeMap::from([(SLICE_1, slice_handle())]);
        let vm =
            DesiredVm { vm: name(), local: Bytes::mib(1), pinned: true, uid: None, slices, rehome: None };
        self.send_state(revision, |desired| drop(desired.vms.insert(ReservationId(1), vm))).await;
    }

    async fn wait(&mut self, is_expected: impl Fn(&ObservedState) -> bool) -> ObservedState {
        while !is_expected(&self.reported) {
            let next = tokio::time::timeout(TIMEOUT, self.reports.outbox.next()).await;
            let next = next.expect("no report meets the condition");
            self.reported = std::mem::take(&mut self.reported).merge_next(next);
        }
        self.reported.clone()
    }

    async fn attach(&self) -> Result<VmMemory, DriverError> {
        self.attach_process(std::process::id()).await
    }

    async fn attach_process(&self, pid: u32) -> Result<VmMemory, DriverError> {
        let process = process::identify_process(pid).unwrap();
        let caller = Caller { process, uid: UserId::ROOT, control_socket: None };
        self.driver.attach(name(), caller, MemoryForm::Descriptors).await
    }
}

fn name() -> Name {
    Name::new("a").unwrap()
}

/// Starts a process that waits for its standard input.
fn start_child() -> Child {
    Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
}

fn end_child(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test]
async fn failed_online_is_retried() {
    let mut rig = Rig::new().await;
    rig.host.fail_next(Call::Online, 2);
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    assert_eq!(rig.host.calls(), [(Call::Online, SLICE_1)]);
}

#[tokio::test]
async fn persistent_failure_is_reported_with_host_error() {
    let mut rig = Rig::new().await;
    rig.host.fail_next(Call::Scrub, 3);
    rig.send_state(1, |desired| drop(desired.scrub.insert(SLICE_1, slice_handle()))).await;
    let report = rig.wait(|report| !report.failed.is_empty()).await;
    let HostFailure { reason, message } =
        HostFailure { reason: report.failed[0].reason, message: report.failed[0].message.clone() };
    assert_eq!(reason, FailureReason::Host);
    assert!(message.contains("use /emc/1.1"), "{message}");
    let report = rig.wait(|report| !report.scrubbed.is_empty()).await;
    assert!(report.failed.is_empty());
}

#[tokio::test]
async fn orphaned_slice_is_closed_before_host_is_clean() {
    let host = Fake::default();
    host.add_orphaned_slice("/emc/1.1");
    host.add_orphaned_slice("/emc/2.1");
    host.fail_next(Call::CloseOrphan, 2);
    let mut rig = Rig::with(host).await;
    rig.send_vm(1).await;
    let report = rig.wait(|report| report.online == [SLICE_1]).await;
    assert!(!report.clean);
    while rig.host.present_slices().unwrap().iter().any(|place| **place == *"/emc/2.1") {
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.host.present_slices().unwrap(), ["/emc/1.1".into()], "a desired slice was closed");
}

#[tokio::test]
async fn slice_that_is_not_zero_is_reported_and_not_opened() {
    let mut rig = Rig::new().await;
    rig.host.make_slice_nonzero(SLICE_1);
    rig.send_vm(1).await;
    let report = rig.wait(|report| !report.failed.is_empty()).await;
    assert_eq!(report.failed[0].reason, FailureReason::NotZero);
    assert!(rig.host.open_slices().is_empty());
}

#[tokio::test]
async fn unrecorded_vm_gets_no_memory() {
    let mut rig = Rig::new().await;
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    std::fs::remove_dir(rig.dir.path().join("vms")).unwrap();
    let error = rig.attach().await.unwrap_err();
    assert!(matches!(error, DriverError::Refused(Refusal::NotRecorded { .. })), "{error:?}");
    assert_eq!(rig.host.freed_local_memory(), [ReservationId(1)]);
    std::fs::create_dir(rig.dir.path().join("vms")).unwrap();
    let memory = rig.attach().await.unwrap();
    assert!(memory.pinned);
    assert_eq!(memory.regions.len(), 2);
    assert!(rig.dir.path().join("vms/r-1.json").exists());
}

#[tokio::test]
async fn failed_attach_returns_host_error_and_can_be_repeated() {
    let mut rig = Rig::new().await;
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    rig.host.fail_next(Call::Memory, 1);
    let error = units::chain(&rig.attach().await.unwrap_err());
    assert!(error.contains("the VM's memory is not available: cannot use a"), "{error}");
    rig.attach().await.unwrap();
}

/// Regression test: the end of a process that received no memory ended the reservation.
#[tokio::test]
async fn end_of_process_without_memory_does_not_end_the_vm() {
    let mut rig = Rig::new().await;
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    rig.host.fail_next(Call::Memory, 1);
    let mut child = start_child();
    rig.attach_process(child.id()).await.unwrap_err();
    assert!(!rig.dir.path().join("vms/r-1.json").exists(), "a process without memory was recorded");
    assert_eq!(rig.host.freed_local_memory(), [ReservationId(1)]);
    end_child(&mut child);
    let memory = rig.attach().await.unwrap();
    assert_eq!(memory.regions.len(), 2);
    let report = rig.wait(|report| report.vms.contains_key(&ReservationId(1))).await;
    assert!(report.ended.is_empty(), "{report:?}");
}

#[tokio::test]
async fn failed_repeated_attach_does_not_free_memory_of_the_running_vm() {
    let mut rig = Rig::new().await;
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    rig.attach().await.unwrap();
    rig.host.fail_next(Call::Memory, 1);
    rig.attach().await.unwrap_err();
    assert!(rig.host.freed_local_memory().is_empty());
}

const USAGE: Usage = Usage { local: Some(Bytes::mib(1)), pool: Some(Bytes::mib(2)), overflow: None };

#[tokio::test]
async fn memory_of_running_vm_is_measured() {
    let mut rig = Rig::new().await;
    rig.host.set_usage(ReservationId(1), USAGE);
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    rig.attach().await.unwrap();
    let (driver, usage) = (rig.driver.clone(), Arc::clone(&rig.reports.usage));
    let measuring = tokio::spawn(usage::measure_periodically(driver, Arc::clone(&rig.host) as _, usage));
    while rig.reports.usage.all().is_empty() {
        tokio::task::yield_now().await;
    }
    measuring.abort();
    assert_eq!(rig.reports.usage.all(), [(ReservationId(1), USAGE)].into());
}

#[tokio::test]
async fn memory_of_ended_vm_is_measured_before_its_end_is_reported() {
    let mut rig = Rig::new().await;
    rig.send_vm(1).await;
    rig.wait(|report| report.online == [SLICE_1]).await;
    let mut child = start_child();
    rig.attach_process(child.id()).await.unwrap();
    rig.host.set_usage(ReservationId(1), USAGE);
    end_child(&mut child);
    rig.wait(|report| report.ended == [ReservationId(1)]).await;
    let touched = TouchedMemory { local: Bytes::mib(1), pool: Bytes::mib(2) };
    assert_eq!(rig.reports.usage.take_unreported(), [(ReservationId(1), touched)]);
}

#[tokio::test]
async fn manager_of_another_rack_is_disconnected() {
    let mut rig = Rig::new().await;
    rig.wait(|report| report.clean).await;
    rig.session.send(SessionEvent::Disconnected).await.unwrap();
    rig.session.send(SessionEvent::Connected { rack: "Q".to_owned(), lease_ttl: Ns::secs(4) }).await.unwrap();
    tokio::time::timeout(TIMEOUT, rig.reports.disconnect.notified()).await.unwrap();
    assert_eq!(rig.reports.rack.borrow().as_deref(), Some("R"));
}

/// Regression test: an agent without a manager returned VM_UNKNOWN for a reserved VM.
#[tokio::test]
async fn vm_is_unknown_only_after_first_desired_state() {
    let mut rig = Rig::start_disconnected(Fake::default());
    let process = process::identify_process(std::process::id()).unwrap();
    let caller = Caller { process, uid: UserId::ROOT, control_socket: None };
    let refused = [
        rig.attach().await.unwrap_err(),
        rig.driver.inspect_memory(name(), caller.clone()).await.unwrap_err(),
    ];
    for error in refused {
        let expected = "cannot look up VM a: the agent is not connected to the manager yet; retry later";
        assert_eq!(units::chain(&error), expected);
    }
    rig.connect().await;
    rig.wait(|report| report.sequence > 0).await;
    let error = units::chain(&rig.attach().await.unwrap_err());
    assert!(error.contains("the agent has not received its desired state from the manager yet"), "{error}");
    rig.send_state(1, |_| ()).await;
    rig.wait(|report| report.number.revision == Revision(1)).await;
    rig.session.send(SessionEvent::Disconnected).await.unwrap();
    for error in
        [rig.attach().await.unwrap_err(), rig.driver.inspect_memory(name(), caller).await.unwrap_err()]
    {
        assert!(matches!(error, DriverError::Refused(Refusal::VmUnknown(_))), "{error:?}");
    }
}

/// Regression test: a record was deleted while its last write was still in progress, and the write
/// created the file again.
#[tokio::test]
async fn record_deleted_during_a_write_is_not_created_again() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path(), "boot").unwrap();
    let process = Process { pid: 1, started: 1, cgroup: String::new() };
    let record = VmRecord {
        reservation: ReservationId(1),
        vm: name(),
        process,
        local: Bytes::mib(1),
        pinned: false,
        uid: None,
        slices: BTreeMap::new(),
        control_socket: None,
        is_rehomed: false,
    };
    let mut driver = idle_driver(dir.path(), records.clone());
    driver.perform(Effect::Record(record.clone()));
    driver.perform(Effect::DeleteRecord(record.reservation));
    finish_tasks(&mut driver).await;
    assert_eq!(records.load().unwrap(), [], "the write created the deleted record again");

    driver.perform(Effect::Record(record.clone()));
    driver.perform(Effect::DeleteRecord(record.reservation));
    let again = VmRecord { local: Bytes::mib(2), ..record };
    driver.perform(Effect::Record(again.clone()));
    finish_tasks(&mut driver).await;
    let stored: Vec<_> = records.load().unwrap().into_iter().map(|vm| vm.record).collect();
    assert_eq!(stored, [again], "the last write is not the stored one");
}

fn idle_driver(dir: &std::path::Path, records: Records) -> Driver {
    let (_, session_events) = mpsc::channel(1);
    let inputs = DriverInputs {
        agent: Agent::new(Ns::ZERO, InstanceId(5), None, Vec::new(), Vec::new()),
        host: Arc::new(Fake::default()),
        records,
        runtime_dir: RuntimeDir::lock(dir).unwrap(),
        metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "fake")),
        session_events,
    };
    Driver::new(inputs).unwrap().0
}

async fn finish_tasks(driver: &mut Driver) {
    while let Some(result) = driver.tasks.join_next().await {
        driver.handle_task_result(result);
    }
}
