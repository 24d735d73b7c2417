//! Thread per EMC: it opens the device, makes its calls in order and reports. Outside, slices have
//! the rack's numbers, inside the device's; they are translated here.
//!
//! A device that vanished may be replaced by one with other grants. Only a comparison
//! ([`DeviceCall::Contents`]) opens a device, and calls contain the comparison on which they rest:
//! on a device that was opened later they are rejected, so that the manager compares it first.

use std::{
    path::PathBuf,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use pool::{
    manager::{Contents, DeviceCall, DeviceDone, DeviceFailure, Grant, SliceError},
    protocol::Handle,
};
use units::{
    EmcId, Name, SliceId,
    limits::{DEVICE_PROBE_INTERVAL, DEVICE_RESULTS_PER_BATCH_MAX},
};

use crate::device::{self, Device, DeviceError, Driver, presence::Presence};

/// Location and size of an EMC.
#[derive(Clone, Debug)]
pub struct EmcPlace {
    /// Number.
    pub id: EmcId,
    /// Name.
    pub name: Name,
    /// Driver.
    pub driver: Driver,
    /// Path of the device, as its driver expects it.
    pub path: PathBuf,
    /// Serial number, if its driver requires one; otherwise empty.
    pub serial: String,
    /// Lowest slice.
    pub first: SliceId,
    /// Number of slices.
    pub slices: u32,
    /// Unique id of its rack.
    pub rack: String,
}

/// Starts the thread of an EMC. Queued calls are made in a row, made durable and reported together.
/// An idle device is checked every [`DEVICE_PROBE_INTERVAL`]. The thread ends when the sender is
/// dropped.
///
/// # Errors
/// The operating system cannot create a thread.
pub fn start(
    place: EmcPlace,
    report: impl Fn(EmcId, Vec<DeviceDone>) + Send + 'static,
) -> std::io::Result<EmcCalls> {
    start_probing(place, DEVICE_PROBE_INTERVAL.as_duration(), report)
}

/// Like [`start`], with the interval between checks of an idle device.
fn start_probing(
    place: EmcPlace,
    every: Duration,
    report: impl Fn(EmcId, Vec<DeviceDone>) + Send + 'static,
) -> std::io::Result<EmcCalls> {
    let (sender, received) = mpsc::channel();
    thread::Builder::new().name(format!("emc-{}", place.id.0)).spawn(move || {
        let mut link = Link::default();
        loop {
            let calls = match received.recv_timeout(every) {
                Ok(call) => {
                    std::iter::once(call).chain(received.try_iter()).take(DEVICE_RESULTS_PER_BATCH_MAX)
                }
                Err(RecvTimeoutError::Timeout) => {
                    link.probe(&place).into_iter().for_each(|failed| report(place.id, vec![failed]));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            report(place.id, perform_all(&place, &mut link, calls.collect()));
        }
    })?;
    Ok(EmcCalls { sender, comparison: 0 })
}

/// Sender to the thread of an EMC. A clone keeps the comparison on which its owner's calls rest.
#[derive(Clone, Debug)]
pub struct EmcCalls {
    sender: mpsc::Sender<EmcCall>,
    /// Number of comparisons requested.
    comparison: u64,
}

/// Call with the number of the comparison on which it rests, or which it is.
#[derive(Clone, Debug)]
struct EmcCall {
    call: DeviceCall,
    comparison: u64,
}

impl EmcCalls {
    /// Queues a call. The thread ends only with this sender and all its clones.
    pub fn send(&mut self, call: DeviceCall) {
        self.comparison += u64::from(call == DeviceCall::Contents);
        let _ = self.sender.send(EmcCall { call, comparison: self.comparison });
    }
}

/// The device as owned by its thread.
#[derive(Default)]
struct Link {
    open: Option<(Box<dyn Device>, Presence)>,
    /// Comparison that opened it.
    opened_for: u64,
    /// It was opened before: its directory is not created again if it is missing.
    was_open: bool,
}

impl Link {
    /// Returns the device for a call: open, and not replaced since the comparison on which the call
    /// rests.
    fn device(&mut self, place: &EmcPlace, call: &EmcCall) -> Result<&mut dyn Device, DeviceError> {
        if call.call != DeviceCall::Contents && (self.open.is_none() || call.comparison < self.opened_for) {
            Presence::of(place.driver, &place.path)?; // a missing directory is the more precise error
            return Err(DeviceError::NotCompared { path: place.path.clone() });
        }
        self.open(place, call.comparison)
    }

    fn open(&mut self, place: &EmcPlace, comparison: u64) -> Result<&mut dyn Device, DeviceError> {
        if self.open.is_none() {
            if self.was_open {
                Presence::of(place.driver, &place.path)?;
            }
            self.opened_for = comparison;
            let device = place.driver.open(&place.path, place.slices, &place.serial, &place.rack)?;
            self.open = Some((device, Presence::of(place.driver, &place.path)?));
            self.was_open = true;
        }
        let (device, _) = self.open.as_mut().expect("opened above");
        Ok(device.as_mut())
    }

    /// Closes the device if its directory is not the one that was opened.
    fn check(&mut self) -> Result<(), DeviceError> {
        let Some((_, presence)) = &self.open else { return Ok(()) };
        presence.check().inspect_err(|_| self.open = None)
    }

    /// Checks an idle device. A failure is reported as one of [`DeviceCall::Contents`], which is
    /// the call that is retried.
    fn probe(&mut self, place: &EmcPlace) -> Option<DeviceDone> {
        let error = units::chain(&self.check().err()?);
        tracing::warn!(emc = %place.name, error, "device vanished");
        Some(DeviceDone::Failed { call: DeviceCall::Contents, failure: DeviceFailure::Error(error) })
    }
}

/// Returns only durable results. Calls whose effects could not be made durable are repeated on a
/// reopened device.
fn perform_all(place: &EmcPlace, link: &mut Link, calls: Vec<EmcCall>) -> Vec<DeviceDone> {
    if let Err(error) = link.check() {
        return fail_all(place, calls, &error, "device vanished");
    }
    let done = calls.iter().map(|call| perform(place, link, call)).collect();
    let Some(Err(error)) = link.open.as_mut().map(|(device, _)| device.commit()) else { return done };
    link.open = None;
    fail_all(place, calls, &error, "device calls not durable")
}

fn fail_all(place: &EmcPlace, calls: Vec<EmcCall>, error: &DeviceError, what: &str) -> Vec<DeviceDone> {
    let message = units::chain(error);
    tracing::warn!(emc = %place.name, calls = calls.len(), error = message, "{what}");
    let failed =
        |EmcCall { call, .. }| DeviceDone::Failed { call, failure: DeviceFailure::Error(message.clone()) };
    calls.into_iter().map(failed).collect()
}

fn perform(place: &EmcPlace, link: &mut Link, wanted: &EmcCall) -> DeviceDone {
    let result = link.device(place, wanted).and_then(|device| place.make(device, &wanted.call));
    let call = wanted.call.clone();
    result.unwrap_or_else(|error| {
        let failure = match error {
            DeviceError::StaleEpoch { highest, .. } => DeviceFailure::StaleEpoch { highest },
            DeviceError::Held { epoch, host, .. } => DeviceFailure::Held { epoch, host },
            refused @ DeviceError::NotStopped { .. } => DeviceFailure::NotFenced(refused.to_string()),
            refused @ (DeviceError::Slice { .. } | DeviceError::NoSuchSlice { .. }) => {
                DeviceFailure::Slice(slice_error(&refused))
            }
            other => DeviceFailure::Error(units::chain(&other)),
        };
        match &failure {
            DeviceFailure::Error(error) => {
                tracing::warn!(emc = %place.name, ?call, error, "device call failed");
            }
            DeviceFailure::Slice(error) => {
                tracing::warn!(emc = %place.name, ?call, error = error.message, "device call of one slice failed");
            }
            DeviceFailure::StaleEpoch { .. } | DeviceFailure::NotFenced(_) | DeviceFailure::Held { .. } => {}
        }
        DeviceDone::Failed { call, failure }
    })
}

fn slice_error(error: &DeviceError) -> SliceError {
    let errno = match error {
        DeviceError::Slice { errno, .. } => errno.raw_os_error(),
        _ => None,
    };
    SliceError { message: units::chain(error), errno }
}

impl EmcPlace {
    fn make(&self, device: &mut dyn Device, call: &DeviceCall) -> Result<DeviceDone, DeviceError> {
        Ok(match *call {
            DeviceCall::Contents => DeviceDone::Contents(self.contents(device.contents()?)),
            DeviceCall::Grant { slice, epoch, host } => {
                let place = device.grant(self.index(slice), epoch, host)?;
                DeviceDone::Granted { slice, epoch, handle: Handle::new(self.name.as_str(), place) }
            }
            DeviceCall::Revoke { slice, epoch } => {
                device.revoke(self.index(slice), epoch)?;
                DeviceDone::Revoked { slice, epoch }
            }
            DeviceCall::Fence { host, powered_off: false } if !self.driver.cuts_off() => {
                return Err(DeviceError::NotStopped { host });
            }
            DeviceCall::Fence { host, .. } => {
                device.fence(host)?;
                DeviceDone::Fenced { host }
            }
        })
    }

    fn index(&self, slice: SliceId) -> u32 {
        slice.0 - self.first.0
    }

    fn slice(&self, index: u32) -> SliceId {
        SliceId(self.first.0 + index)
    }

    fn contents(&self, contents: device::Contents) -> Contents {
        let grant = |g: device::Grant| Grant {
            slice: self.slice(g.slice),
            epoch: g.epoch,
            host: g.host,
            handle: Handle::new(self.name.as_str(), g.handle),
        };
        let places = contents.places.into_iter().zip(0..);
        let place = |(place, index)| (self.slice(index), Handle::new(self.name.as_str(), place));
        let highest = contents.highest.into_iter().zip(0..).filter(|(epoch, _)| epoch.0 > 0);
        Contents {
            grants: contents.grants.into_iter().map(grant).collect(),
            highest: highest.map(|(epoch, index)| (self.slice(index), epoch)).collect(),
            places: places.map(place).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use units::{Epoch, HostId};

    use super::*;

    fn place(directory: &std::path::Path) -> EmcPlace {
        EmcPlace {
            id: EmcId(0),
            name: Name::new("e0").unwrap(),
            driver: Driver::Emulated,
            path: directory.to_owned(),
            serial: String::new(),
            first: SliceId(100),
            slices: 60,
            rack: "r".to_owned(),
        }
    }

    fn grant(slice: u32) -> DeviceCall {
        DeviceCall::Grant { slice: SliceId(slice), epoch: Epoch(1), host: HostId(0) }
    }

    /// Makes calls that rest on the latest comparison; the first call is a comparison.
    fn make_all(place: &EmcPlace, link: &mut Link, calls: Vec<DeviceCall>) -> Vec<DeviceDone> {
        if !link.was_open && calls[0] != DeviceCall::Contents {
            make_all(place, link, vec![DeviceCall::Contents]);
        }
        let call = |call| EmcCall { call, comparison: u64::MAX };
        perform_all(place, link, calls.into_iter().map(call).collect())
    }

    /// A directory in place of a slice's file also stops root, unlike permissions.
    #[test]
    fn slice_whose_file_cannot_be_opened_fails_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), Link::default());
        make_all(&place, &mut device, vec![DeviceCall::Contents]);
        let file = directory.path().join("slices/00007.1.h0");
        std::fs::create_dir(&file).unwrap();
        let mut failed = Vec::new();
        for done in make_all(&place, &mut device, (100..160).map(grant).collect()) {
            match done {
                DeviceDone::Granted { .. } => {}
                DeviceDone::Failed { call, failure: DeviceFailure::Slice(error) } => {
                    failed.push((call, error))
                }
                other => panic!("{other:?}"),
            }
        }
        let [(call, error)] = &failed[..] else { panic!("{failed:?}") };
        assert_eq!((call, error.errno), (&grant(107), Some(rustix::io::Errno::ISDIR.raw_os_error())));
        assert!(error.message.contains("slices/00007.1.h0: "), "{}", error.message);
        let again = make_all(&place, &mut device, vec![grant(107)]);
        assert!(matches!(again[..], [DeviceDone::Failed { failure: DeviceFailure::Slice(_), .. }]));
        std::fs::remove_dir(&file).unwrap();
        let repaired = make_all(&place, &mut device, vec![grant(107)]);
        assert!(matches!(repaired[..], [DeviceDone::Granted { .. }]), "{repaired:?}");
    }

    #[test]
    fn device_of_another_rack_is_refused_and_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), Link::default());
        make_all(&place, &mut device, vec![grant(107)]);
        drop(device);
        let other = EmcPlace { rack: "other".to_owned(), ..place.clone() };
        let stale = directory.path().join("slices/00007.0.h0"); // a revocation that its own rack would complete
        std::fs::write(&stale, "").unwrap();
        let refused = make_all(&other, &mut Link::default(), vec![DeviceCall::Contents, grant(108)]);
        let errors = refused.iter().map(|done| match done {
            DeviceDone::Failed { failure: DeviceFailure::Error(error), .. } => error.as_str(),
            _ => panic!("{done:?}"),
        });
        let errors: Vec<_> = errors.collect();
        assert!(
            errors.len() == 2 && errors[0].contains("an EMC of rack r, this is rack other"),
            "{errors:?}"
        );
        assert!(stale.exists() && !directory.path().join("slices/00008.1.h0").exists());
        let again = make_all(&place, &mut Link::default(), vec![grant(107)]);
        assert!(matches!(again[..], [DeviceDone::Granted { .. }]), "{again:?}");
    }

    #[test]
    fn device_without_its_directory_fails_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), Link::default());
        make_all(&place, &mut device, vec![DeviceCall::Contents]);
        std::fs::remove_dir(directory.path().join("slices")).unwrap();
        let done = make_all(&place, &mut device, vec![grant(107)]);
        assert!(
            matches!(done[..], [DeviceDone::Failed { failure: DeviceFailure::Error(_), .. }]),
            "{done:?}"
        );
    }

    #[test]
    fn slice_that_another_host_has_is_reported_with_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), Link::default());
        make_all(&place, &mut device, vec![grant(100)]);
        let (slice, epoch, host) = (SliceId(100), Epoch(2), HostId(1));
        let done = make_all(&place, &mut device, vec![DeviceCall::Grant { slice, epoch, host }]);
        let [DeviceDone::Failed { failure, .. }] = &done[..] else { panic!("{done:?}") };
        assert_eq!(*failure, DeviceFailure::Held { epoch: Epoch(1), host: HostId(0) });
    }

    /// Calls that the manager made before it knew that the device vanished are not made on its
    /// replacement, which may have other grants.
    #[test]
    fn queued_call_of_a_vanished_device_is_refused_by_its_replacement() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("emc");
        let (place, mut device) = (place(&path), Link::default());
        make_all(&place, &mut device, vec![DeviceCall::Contents, grant(107)]);
        std::fs::rename(&path, parent.path().join("away")).unwrap();
        drop(place.driver.open(&path, place.slices, &place.serial, &place.rack).unwrap());
        for slice in [108, 109] {
            let done = make_all(&place, &mut device, vec![grant(slice)]);
            let failed = |done: &DeviceDone| {
                matches!(done, DeviceDone::Failed { failure: DeviceFailure::Error(_), .. })
            };
            assert!(done.iter().all(failed), "{done:?}");
        }
        assert_eq!(std::fs::read_dir(path.join("slices")).unwrap().count(), 0);
        let done = make_all(&place, &mut device, vec![DeviceCall::Contents]);
        assert!(
            matches!(&done[..], [DeviceDone::Contents(contents)] if contents.grants.is_empty()),
            "{done:?}"
        );
        let done = make_all(&place, &mut device, vec![grant(108)]);
        assert!(matches!(done[..], [DeviceDone::Granted { .. }]), "{done:?}");
    }

    fn is_vanished(done: &[DeviceDone]) -> bool {
        let vanished = |done: &DeviceDone| matches!(done, DeviceDone::Failed { failure: DeviceFailure::Error(error), .. } if error.contains("restore the EMC's directory"));
        done.iter().all(vanished)
    }

    /// Returns the first matching report; the thread of the EMC reports within milliseconds.
    fn await_report(reports: &mpsc::Receiver<Vec<DeviceDone>>, fits: impl Fn(&[DeviceDone]) -> bool) {
        loop {
            let done = reports.recv_timeout(Duration::from_secs(60)).expect("a report");
            if fits(&done) {
                return;
            }
        }
    }

    #[test]
    fn idle_device_whose_directory_vanishes_is_reported_and_returns() {
        let parent = tempfile::tempdir().unwrap();
        let (path, away) = (parent.path().join("emc"), parent.path().join("away"));
        let (report, reports) = mpsc::channel();
        let report = move |_, done| drop(report.send(done));
        let mut calls = start_probing(place(&path), Duration::from_millis(1), report).unwrap();
        calls.send(DeviceCall::Contents);
        calls.send(grant(107));
        await_report(&reports, |done| matches!(done.last(), Some(DeviceDone::Granted { .. })));
        std::fs::rename(&path, &away).unwrap();
        await_report(&reports, is_vanished);
        calls.send(DeviceCall::Contents);
        await_report(&reports, is_vanished);
        assert!(!path.exists(), "an empty device was begun in the place of the missing one");
        std::fs::rename(&away, &path).unwrap();
        calls.send(DeviceCall::Contents);
        let has_grant = |done: &[DeviceDone]| matches!(done, [DeviceDone::Contents(contents)] if contents.grants.len() == 1);
        await_report(&reports, has_grant);
    }

    #[test]
    fn call_of_vanished_device_fails_as_a_whole() {
        for vanished in ["", "slices", "epochs", "rack-uuid"] {
            let parent = tempfile::tempdir().unwrap();
            let path = parent.path().join("emc");
            let (place, mut device) = (place(&path), Link::default());
            make_all(&place, &mut device, vec![grant(107)]);
            let (from, to) = (path.join(vanished), parent.path().join("away"));
            std::fs::rename(&from, &to).unwrap();
            let revoke = DeviceCall::Revoke { slice: SliceId(107), epoch: Epoch(1) };
            for _ in 0..2 {
                let done = make_all(&place, &mut device, vec![revoke.clone(), grant(108)]);
                assert!(done.len() == 2 && is_vanished(&done), "{vanished}: {done:?}");
            }
            std::fs::rename(&to, &from).unwrap();
            let done = make_all(&place, &mut device, vec![DeviceCall::Contents, revoke.clone()]);
            assert!(matches!(done[..], [_, DeviceDone::Revoked { .. }]), "{vanished}: {done:?}");
        }
    }
}
