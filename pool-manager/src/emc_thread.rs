//! One thread per EMC opens the device, makes calls in order and reports the results. It translates
//! the rack's slice numbers into slice indices of the device, which start at 0.
//!
//! A device that vanished may be replaced by a device with other grants. Only
//! [`DeviceCall::Contents`] opens a device, and the manager then compares the contents with the
//! ledger. Every call carries the number of the latest comparison. A device that was opened by a
//! later comparison rejects the call.

use std::{
    path::PathBuf,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use pool::{
    manager::{Contents, DeviceCall, DeviceFailure, DeviceReply, Grant, SliceError},
    protocol::Handle,
};
use units::{
    EmcId, SliceId,
    limits::{DEVICE_PROBE_INTERVAL, DEVICE_RESULTS_PER_BATCH_MAX},
};

use crate::device::{self, Device, DeviceError, DeviceLeader, Driver, EmcOwner, presence::DevicePresence};

/// Location and size of an EMC, as needed to open its device.
#[derive(Clone, Debug)]
pub struct EmcDescription {
    /// ID of the EMC in the ledger.
    pub id: EmcId,
    /// Driver that opens the device.
    pub driver: Driver,
    /// Path of the device for the driver.
    pub path: PathBuf,
    /// Serial number of the device; empty if the driver does not use one.
    pub serial: String,
    /// Rack-wide number of the EMC's first slice.
    pub first: SliceId,
    /// Number of slices of the EMC.
    pub slices: u32,
    /// Rack and name of the EMC.
    pub owner: EmcOwner,
    /// Set if the manager was elected.
    pub leader: Option<DeviceLeader>,
}

/// Starts the thread of an EMC. The thread performs queued calls in batches, makes each batch
/// durable, and passes the results to `report`. The thread checks an idle device every
/// [`DEVICE_PROBE_INTERVAL`], and ends when the sender and all its clones are dropped.
///
/// # Errors
/// Returns the error of the operating system if the thread cannot be created.
pub fn start(
    emc: EmcDescription,
    report: impl Fn(EmcId, Vec<DeviceReply>) + Send + 'static,
) -> std::io::Result<EmcSender> {
    start_with_interval(emc, DEVICE_PROBE_INTERVAL.as_duration(), report)
}

/// Like [`start`], but checks an idle device every `interval`.
fn start_with_interval(
    emc: EmcDescription,
    interval: Duration,
    report: impl Fn(EmcId, Vec<DeviceReply>) + Send + 'static,
) -> std::io::Result<EmcSender> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name(format!("emc-{}", emc.id.0)).spawn(move || {
        let mut state = DeviceState::default();
        loop {
            let calls = match receiver.recv_timeout(interval) {
                Ok(call) => {
                    std::iter::once(call).chain(receiver.try_iter()).take(DEVICE_RESULTS_PER_BATCH_MAX)
                }
                Err(RecvTimeoutError::Timeout) => {
                    state.probe_device(&emc).into_iter().for_each(|failed| report(emc.id, vec![failed]));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            report(emc.id, perform_all_calls(&emc, &mut state, calls.collect()));
        }
    })?;
    Ok(EmcSender { sender, comparison: 0 })
}

/// Sender of calls to the thread of an EMC. A clone keeps the number of the latest comparison at
/// the time of cloning, so that its calls are rejected after a newer comparison opened the device.
#[derive(Clone, Debug)]
pub struct EmcSender {
    sender: mpsc::Sender<EmcCall>,
    /// Number of comparisons requested through this sender, including those before it was cloned.
    comparison: u64,
}

/// Call to the EMC's thread, with the number of the latest comparison requested before the call. A
/// comparison carries its own number.
#[derive(Clone, Debug)]
struct EmcCall {
    call: DeviceCall,
    comparison: u64,
}

impl EmcSender {
    /// Queues a call for the thread. The thread runs as long as this sender exists.
    pub fn send(&mut self, call: DeviceCall) {
        self.comparison += u64::from(call == DeviceCall::Contents);
        let _ = self.sender.send(EmcCall { call, comparison: self.comparison });
    }
}

/// Device and its state, owned by the EMC's thread.
#[derive(Default)]
struct DeviceState {
    open: Option<(Box<dyn Device>, DevicePresence)>,
    /// Number of the comparison that opened the device.
    opened_by_comparison: u64,
    /// Whether this thread has opened the device before. If so, a missing directory is an error and
    /// is not created.
    was_opened: bool,
}

impl DeviceState {
    /// Returns the open device for a call. Rejects the call if the device was reopened after the
    /// comparison to which the call refers.
    fn device_for_call(
        &mut self,
        emc: &EmcDescription,
        call: &EmcCall,
    ) -> Result<&mut dyn Device, DeviceError> {
        if call.call != DeviceCall::Contents
            && (self.open.is_none() || call.comparison < self.opened_by_comparison)
        {
            emc.record_presence()?; // reports a missing directory first, because it is the cause
            return Err(DeviceError::NotCompared { path: emc.path.clone() });
        }
        self.open(emc, call.comparison)
    }

    fn open(&mut self, emc: &EmcDescription, comparison: u64) -> Result<&mut dyn Device, DeviceError> {
        if self.open.is_none() {
            if self.was_opened {
                emc.record_presence()?;
            }
            self.opened_by_comparison = comparison;
            let device =
                emc.driver.open(&emc.path, emc.slices, &emc.serial, &emc.owner, emc.leader.as_ref())?;
            self.open = Some((device, emc.record_presence()?));
            self.was_opened = true;
        }
        let (device, _) = self.open.as_mut().expect("the device was opened above");
        Ok(device.as_mut())
    }

    /// Closes the device and returns an error if its directory was removed or replaced.
    fn check_presence(&mut self) -> Result<(), DeviceError> {
        let Some((_, presence)) = &self.open else { return Ok(()) };
        presence.check().inspect_err(|_| self.open = None)
    }

    /// Checks an idle device. Returns a failure as the result of [`DeviceCall::Contents`], because
    /// the manager retries this call.
    fn probe_device(&mut self, emc: &EmcDescription) -> Option<DeviceReply> {
        let error = units::chain(&self.check_presence().err()?);
        tracing::warn!(emc = %emc.owner.emc, error, "check of the EMC's directory failed");
        Some(DeviceReply::Failed { call: DeviceCall::Contents, failure: DeviceFailure::Error(error) })
    }
}

/// Performs a batch of calls, makes it durable and returns the results. If a device file is missing
/// or the batch cannot be made durable, all calls of the batch fail, and the device is closed.
fn perform_all_calls(emc: &EmcDescription, state: &mut DeviceState, calls: Vec<EmcCall>) -> Vec<DeviceReply> {
    if let Err(error) = state.check_presence() {
        return fail_all_calls(emc, calls, &error, "check of the EMC's directory failed");
    }
    let results = calls.iter().map(|call| perform(emc, state, call)).collect();
    let Some(Err(error)) = state.open.as_mut().map(|(device, _)| device.commit()) else { return results };
    state.open = None;
    fail_all_calls(emc, calls, &error, "cannot make device calls durable")
}

fn fail_all_calls(
    emc: &EmcDescription,
    calls: Vec<EmcCall>,
    error: &DeviceError,
    event: &str,
) -> Vec<DeviceReply> {
    let message = units::chain(error);
    tracing::warn!(emc = %emc.owner.emc, calls = calls.len(), error = message, "{event}");
    let failed =
        |EmcCall { call, .. }| DeviceReply::Failed { call, failure: DeviceFailure::Error(message.clone()) };
    calls.into_iter().map(failed).collect()
}

fn perform(emc: &EmcDescription, state: &mut DeviceState, request: &EmcCall) -> DeviceReply {
    let result =
        state.device_for_call(emc, request).and_then(|device| emc.perform_call(device, &request.call));
    let call = request.call.clone();
    result.unwrap_or_else(|error| {
        let failure = match error {
            DeviceError::StaleEpoch { highest, .. } => DeviceFailure::StaleEpoch { highest },
            DeviceError::Held { epoch, host, .. } => DeviceFailure::Held { epoch, host },
            rejection @ DeviceError::NotPoweredOff { .. } => DeviceFailure::NotFenced(rejection.to_string()),
            rejection @ (DeviceError::Slice { .. } | DeviceError::NoSuchSlice { .. }) => {
                DeviceFailure::Slice(to_slice_error(&rejection))
            }
            other => DeviceFailure::Error(units::chain(&other)),
        };
        match &failure {
            DeviceFailure::Error(error) => {
                tracing::warn!(emc = %emc.owner.emc, ?call, error, "device call failed");
            }
            DeviceFailure::Slice(error) => {
                tracing::warn!(emc = %emc.owner.emc, ?call, error = error.message, "device call failed for one slice");
            }
            DeviceFailure::StaleEpoch { .. } | DeviceFailure::NotFenced(_) | DeviceFailure::Held { .. } => {}
        }
        DeviceReply::Failed { call, failure }
    })
}

fn to_slice_error(error: &DeviceError) -> SliceError {
    let errno = match error {
        DeviceError::Slice { errno, .. } => errno.raw_os_error(),
        _ => None,
    };
    SliceError { message: units::chain(error), errno }
}

impl EmcDescription {
    fn record_presence(&self) -> Result<DevicePresence, DeviceError> {
        DevicePresence::record(self.driver, &self.path, self.leader.as_ref())
    }

    fn perform_call(&self, device: &mut dyn Device, call: &DeviceCall) -> Result<DeviceReply, DeviceError> {
        Ok(match *call {
            DeviceCall::Contents => DeviceReply::Contents(self.to_rack_contents(device.contents()?)),
            DeviceCall::Grant { slice, epoch, host } => {
                let handle = device.grant(self.slice_index(slice), epoch, host)?;
                DeviceReply::Granted { slice, epoch, handle: Handle::new(self.owner.emc.as_str(), handle) }
            }
            DeviceCall::Revoke { slice, epoch } => {
                device.revoke(self.slice_index(slice), epoch)?;
                DeviceReply::Revoked { slice, epoch }
            }
            DeviceCall::Fence { host, powered_off: false } if !self.driver.can_revoke() => {
                return Err(DeviceError::NotPoweredOff { host });
            }
            DeviceCall::Fence { host, .. } => {
                device.fence(host)?;
                DeviceReply::Fenced { host }
            }
        })
    }

    fn slice_index(&self, slice: SliceId) -> u32 {
        slice.0 - self.first.0
    }

    fn rack_slice_id(&self, index: u32) -> SliceId {
        SliceId(self.first.0 + index)
    }

    fn to_rack_contents(&self, contents: device::Contents) -> Contents {
        let grant = |g: device::Grant| Grant {
            slice: self.rack_slice_id(g.slice),
            epoch: g.epoch,
            host: g.host,
            handle: Handle::new(self.owner.emc.as_str(), g.handle),
        };
        let handles = contents.handles.into_iter().zip(0..);
        let place =
            |(handle, index)| (self.rack_slice_id(index), Handle::new(self.owner.emc.as_str(), handle));
        let highest = contents.highest.into_iter().zip(0..).filter(|(epoch, _)| epoch.0 > 0);
        Contents {
            grants: contents.grants.into_iter().map(grant).collect(),
            highest: highest.map(|(epoch, index)| (self.rack_slice_id(index), epoch)).collect(),
            places: handles.map(place).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, os::unix::fs::PermissionsExt as _};

    use units::{Epoch, HostId, Name};

    use super::*;
    use crate::test_files::{create_fifo, run_with_timeout};

    const RACK_UUID: &str = "11111111-2222-3333-4444-555555555555";
    const OTHER_RACK_UUID: &str = "99999999-2222-3333-4444-555555555555";

    fn emc(directory: &std::path::Path) -> EmcDescription {
        EmcDescription {
            id: EmcId(0),
            driver: Driver::Emulated,
            path: directory.to_owned(),
            serial: String::new(),
            first: SliceId(100),
            slices: 60,
            owner: EmcOwner {
                rack: RACK_UUID.to_owned(),
                emc: Name::new("e0").unwrap(),
                others: BTreeSet::new(),
            },
            leader: None,
        }
    }

    fn grant(slice: u32) -> DeviceCall {
        DeviceCall::Grant { slice: SliceId(slice), epoch: Epoch(1), host: HostId(0) }
    }

    /// Performs calls that refer to the latest comparison, so that the device does not reject them.
    /// Requests the contents first if the device was not opened before.
    fn perform_calls(
        emc: &EmcDescription,
        state: &mut DeviceState,
        calls: Vec<DeviceCall>,
    ) -> Vec<DeviceReply> {
        if !state.was_opened && calls[0] != DeviceCall::Contents {
            perform_calls(emc, state, vec![DeviceCall::Contents]);
        }
        let call = |call| EmcCall { call, comparison: u64::MAX };
        perform_all_calls(emc, state, calls.into_iter().map(call).collect())
    }

    /// Replaces a slice's file by a directory, which makes operations fail also for root.
    #[test]
    fn failed_file_of_a_slice_affects_only_this_slice() {
        let directory = tempfile::tempdir().unwrap();
        let (emc, mut device) = (emc(directory.path()), DeviceState::default());
        perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
        let file = directory.path().join("slices/00007.1.h0");
        std::fs::create_dir(&file).unwrap();
        let mut failed = Vec::new();
        for result in perform_calls(&emc, &mut device, (100..160).map(grant).collect()) {
            match result {
                DeviceReply::Granted { .. } => {}
                DeviceReply::Failed { call, failure: DeviceFailure::Slice(error) } => {
                    failed.push((call, error))
                }
                other => panic!("{other:?}"),
            }
        }
        let [(call, error)] = &failed[..] else { panic!("{failed:?}") };
        assert_eq!((call, error.errno), (&grant(107), Some(rustix::io::Errno::ISDIR.raw_os_error())));
        assert!(error.message.contains("slices/00007.1.h0: "), "{}", error.message);
        let again = perform_calls(&emc, &mut device, vec![grant(107)]);
        assert!(matches!(again[..], [DeviceReply::Failed { failure: DeviceFailure::Slice(_), .. }]));
        std::fs::remove_dir(&file).unwrap();
        let repaired = perform_calls(&emc, &mut device, vec![grant(107)]);
        assert!(matches!(repaired[..], [DeviceReply::Granted { .. }]), "{repaired:?}");
    }

    #[test]
    fn device_of_another_rack_is_rejected_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let (emc, mut device) = (emc(directory.path()), DeviceState::default());
        perform_calls(&emc, &mut device, vec![grant(107)]);
        drop(device);
        let mut other = emc.clone();
        OTHER_RACK_UUID.clone_into(&mut other.owner.rack);
        let stale = directory.path().join("slices/00007.0.h0"); // the owning rack would delete this stale file
        std::fs::write(&stale, "").unwrap();
        let rejection =
            perform_calls(&other, &mut DeviceState::default(), vec![DeviceCall::Contents, grant(108)]);
        let errors = rejection.iter().map(|result| match result {
            DeviceReply::Failed { failure: DeviceFailure::Error(error), .. } => error.as_str(),
            _ => panic!("{result:?}"),
        });
        let errors: Vec<_> = errors.collect();
        assert!(
            errors.len() == 2
                && errors[0].contains(&format!("contains rack {RACK_UUID}, expected {OTHER_RACK_UUID}")),
            "{errors:?}"
        );
        assert!(stale.exists() && !directory.path().join("slices/00008.1.h0").exists());
        let again = perform_calls(&emc, &mut DeviceState::default(), vec![grant(107)]);
        assert!(matches!(again[..], [DeviceReply::Granted { .. }]), "{again:?}");
    }

    #[test]
    fn special_device_file_is_reported_without_waiting() {
        for name in ["rack-uuid", "slices", "fault", "epochs"] {
            let directory = tempfile::tempdir().unwrap();
            create_fifo(&directory.path().join(name));
            let emc = emc(directory.path());
            let results = run_with_timeout(move || {
                let call = EmcCall { call: DeviceCall::Contents, comparison: 1 };
                perform_all_calls(&emc, &mut DeviceState::default(), vec![call])
            });
            let [DeviceReply::Failed { failure: DeviceFailure::Error(error), .. }] = &results[..] else {
                panic!("{name}: {results:?}")
            };
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn device_folder_writable_by_others_fails_until_its_mode_is_corrected() {
        let set_mode = |path: &std::path::Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        for name in ["", "slices"] {
            let directory = tempfile::tempdir().unwrap();
            let (emc, mut device) = (emc(directory.path()), DeviceState::default());
            let folder = directory.path().join(name);
            let is_rejected = |results: &[DeviceReply]| {
                matches!(results, [DeviceReply::Failed { failure: DeviceFailure::Error(error), .. }]
                    if error.contains("has mode 0777: must not be writable by group or others"))
            };
            perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
            set_mode(&folder, 0o777);
            let probed = device.probe_device(&emc).expect("the probe must fail");
            assert!(is_rejected(&[probed]));
            let results = perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
            assert!(is_rejected(&results), "{results:?}");
            set_mode(&folder, 0o711);
            let results = perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
            assert!(matches!(results[..], [DeviceReply::Contents(_)]), "{results:?}");
        }
    }

    #[test]
    fn missing_slices_directory_fails_the_whole_device() {
        let directory = tempfile::tempdir().unwrap();
        let (emc, mut device) = (emc(directory.path()), DeviceState::default());
        perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
        std::fs::remove_dir(directory.path().join("slices")).unwrap();
        let results = perform_calls(&emc, &mut device, vec![grant(107)]);
        assert!(
            matches!(results[..], [DeviceReply::Failed { failure: DeviceFailure::Error(_), .. }]),
            "{results:?}"
        );
    }

    #[test]
    fn grant_of_a_held_slice_reports_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let (emc, mut device) = (emc(directory.path()), DeviceState::default());
        perform_calls(&emc, &mut device, vec![grant(100)]);
        let (slice, epoch, host) = (SliceId(100), Epoch(2), HostId(1));
        let results = perform_calls(&emc, &mut device, vec![DeviceCall::Grant { slice, epoch, host }]);
        let [DeviceReply::Failed { failure, .. }] = &results[..] else { panic!("{results:?}") };
        assert_eq!(*failure, DeviceFailure::Held { epoch: Epoch(1), host: HostId(0) });
    }

    /// Replaces the device by an empty one. Calls that were queued before must not be performed on
    /// the new device, which may have other grants.
    #[test]
    fn queued_call_is_not_performed_on_a_replaced_device() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("emc");
        let (emc, mut device) = (emc(&path), DeviceState::default());
        perform_calls(&emc, &mut device, vec![DeviceCall::Contents, grant(107)]);
        std::fs::rename(&path, parent.path().join("away")).unwrap();
        drop(emc.driver.open(&path, emc.slices, &emc.serial, &emc.owner, None).unwrap());
        for slice in [108, 109] {
            let results = perform_calls(&emc, &mut device, vec![grant(slice)]);
            let failed = |result: &DeviceReply| {
                matches!(result, DeviceReply::Failed { failure: DeviceFailure::Error(_), .. })
            };
            assert!(results.iter().all(failed), "{results:?}");
        }
        assert_eq!(std::fs::read_dir(path.join("slices")).unwrap().count(), 0);
        let results = perform_calls(&emc, &mut device, vec![DeviceCall::Contents]);
        assert!(
            matches!(&results[..], [DeviceReply::Contents(contents)] if contents.grants.is_empty()),
            "{results:?}"
        );
        let results = perform_calls(&emc, &mut device, vec![grant(108)]);
        assert!(matches!(results[..], [DeviceReply::Granted { .. }]), "{results:?}");
    }

    fn is_device_vanished(results: &[DeviceReply]) -> bool {
        let vanished = |result: &DeviceReply| matches!(result, DeviceReply::Failed { failure: DeviceFailure::Error(error), .. } if error.contains("restore the EMC's directory"));
        results.iter().all(vanished)
    }

    /// Waits for a matching report. The EMC's thread checks the device every millisecond.
    fn await_report(reports: &mpsc::Receiver<Vec<DeviceReply>>, matches: impl Fn(&[DeviceReply]) -> bool) {
        loop {
            let results = reports.recv_timeout(Duration::from_secs(60)).expect("timeout: no report");
            if matches(&results) {
                return;
            }
        }
    }

    #[test]
    fn missing_idle_device_is_reported_and_recovers() {
        let parent = tempfile::tempdir().unwrap();
        let (path, away) = (parent.path().join("emc"), parent.path().join("away"));
        let (report, reports) = mpsc::channel();
        let report = move |_, results| drop(report.send(results));
        let mut calls = start_with_interval(emc(&path), Duration::from_millis(1), report).unwrap();
        calls.send(DeviceCall::Contents);
        calls.send(grant(107));
        await_report(&reports, |results| matches!(results.last(), Some(DeviceReply::Granted { .. })));
        std::fs::rename(&path, &away).unwrap();
        await_report(&reports, is_device_vanished);
        calls.send(DeviceCall::Contents);
        await_report(&reports, is_device_vanished);
        assert!(!path.exists(), "the missing device was created again");
        std::fs::rename(&away, &path).unwrap();
        calls.send(DeviceCall::Contents);
        let has_grant = |results: &[DeviceReply]| matches!(results, [DeviceReply::Contents(contents)] if contents.grants.len() == 1);
        await_report(&reports, has_grant);
    }

    #[test]
    fn all_calls_fail_while_a_device_file_is_missing() {
        for vanished in ["", "slices", "epochs", "rack-uuid"] {
            let parent = tempfile::tempdir().unwrap();
            let path = parent.path().join("emc");
            let (emc, mut device) = (emc(&path), DeviceState::default());
            perform_calls(&emc, &mut device, vec![grant(107)]);
            let (from, to) = (path.join(vanished), parent.path().join("away"));
            std::fs::rename(&from, &to).unwrap();
            let revoke = DeviceCall::Revoke { slice: SliceId(107), epoch: Epoch(1) };
            for _ in 0..2 {
                let results = perform_calls(&emc, &mut device, vec![revoke.clone(), grant(108)]);
                assert!(results.len() == 2 && is_device_vanished(&results), "{vanished}: {results:?}");
            }
            std::fs::rename(&to, &from).unwrap();
            let results = perform_calls(&emc, &mut device, vec![DeviceCall::Contents, revoke.clone()]);
            assert!(matches!(results[..], [_, DeviceReply::Revoked { .. }]), "{vanished}: {results:?}");
        }
    }
}
