//! One thread per EMC: it opens the device, makes its calls in order and reports. Slices are the rack's numbers outside
//! and the device's own inside; this is where they are translated.

use std::{path::PathBuf, sync::mpsc, thread};

use pool::{
    manager::{Contents, DeviceCall, DeviceDone, DeviceFailure, Grant, SliceError},
    protocol::Handle,
};
use units::{EmcId, Name, SliceId, limits::DEVICE_ANSWERS_AT_ONCE_MAX};

use crate::device::{self, Device, DeviceError, Driver};

/// Where an EMC is and what it has.
#[derive(Clone, Debug)]
pub struct EmcPlace {
    /// Its number.
    pub id: EmcId,
    /// Its name.
    pub name: Name,
    /// Which driver speaks to it.
    pub driver: Driver,
    /// Where the driver finds it.
    pub path: PathBuf,
    /// Its serial number, if its driver asks for one; else empty.
    pub serial: String,
    /// Its lowest slice.
    pub first: SliceId,
    /// How many slices it has.
    pub slices: u32,
    /// The uuid of its rack.
    pub rack: String,
}

/// Starts the thread of one EMC. Calls that wait are made in a row, made durable and reported together. It ends when the
/// sender is dropped.
///
/// # Errors
/// The operating system has no more threads.
pub fn start(
    place: EmcPlace,
    report: impl Fn(EmcId, Vec<DeviceDone>) + Send + 'static,
) -> std::io::Result<mpsc::Sender<DeviceCall>> {
    let (calls, received) = mpsc::channel();
    thread::Builder::new().name(format!("emc-{}", place.id.0)).spawn(move || {
        let mut device = None;
        while let Ok(call) = received.recv() {
            let calls = std::iter::once(call).chain(received.try_iter()).take(DEVICE_ANSWERS_AT_ONCE_MAX);
            report(place.id, perform_all(&place, &mut device, calls.collect()));
        }
    })?;
    Ok(calls)
}

/// Nothing is answered that is not durable. What could not be made so is asked of a device that was opened anew.
fn perform_all(
    place: &EmcPlace,
    device: &mut Option<Box<dyn Device>>,
    calls: Vec<DeviceCall>,
) -> Vec<DeviceDone> {
    let done = calls.iter().map(|call| perform(place, device, call.clone())).collect();
    let Some(Err(error)) = device.as_mut().map(|device| device.commit()) else { return done };
    *device = None;
    let message = units::chain(&error);
    tracing::warn!(emc = %place.name, calls = calls.len(), error = message, "device calls not durable");
    let failed = |call| DeviceDone::Failed { call, failure: DeviceFailure::Error(message.clone()) };
    calls.into_iter().map(failed).collect()
}

fn perform(place: &EmcPlace, device: &mut Option<Box<dyn Device>>, call: DeviceCall) -> DeviceDone {
    let opened = match device {
        Some(device) => Ok(device),
        None => place
            .driver
            .open(&place.path, place.slices, &place.serial, &place.rack)
            .map(|opened| device.insert(opened)),
    };
    let result = opened.and_then(|device| place.make(device.as_mut(), &call));
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

    /// A directory where a slice's file is to be stops root, too, unlike permissions.
    #[test]
    fn slice_whose_file_cannot_be_opened_fails_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), None);
        perform_all(&place, &mut device, vec![DeviceCall::Contents]);
        let file = directory.path().join("slices/00007.1.h0");
        std::fs::create_dir(&file).unwrap();
        let mut failed = Vec::new();
        for done in perform_all(&place, &mut device, (100..160).map(grant).collect()) {
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
        let again = perform_all(&place, &mut device, vec![grant(107)]);
        assert!(matches!(again[..], [DeviceDone::Failed { failure: DeviceFailure::Slice(_), .. }]));
        std::fs::remove_dir(&file).unwrap();
        let repaired = perform_all(&place, &mut device, vec![grant(107)]);
        assert!(matches!(repaired[..], [DeviceDone::Granted { .. }]), "{repaired:?}");
    }

    #[test]
    fn device_of_another_rack_is_refused_and_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), None);
        perform_all(&place, &mut device, vec![grant(107)]);
        drop(device);
        let other = EmcPlace { rack: "other".to_owned(), ..place.clone() };
        let stale = directory.path().join("slices/00007.0.h0"); // a revocation that its own rack would finish
        std::fs::write(&stale, "").unwrap();
        let refused = perform_all(&other, &mut None, vec![DeviceCall::Contents, grant(108)]);
        for done in refused {
            let DeviceDone::Failed { failure: DeviceFailure::Error(error), .. } = done else {
                panic!("{done:?}")
            };
            assert!(error.contains("an EMC of rack r, this is rack other"), "{error}");
        }
        assert!(stale.exists() && !directory.path().join("slices/00008.1.h0").exists());
        let again = perform_all(&place, &mut None, vec![grant(107)]);
        assert!(matches!(again[..], [DeviceDone::Granted { .. }]), "{again:?}");
    }

    #[test]
    fn device_without_its_directory_fails_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), None);
        perform_all(&place, &mut device, vec![DeviceCall::Contents]);
        std::fs::remove_dir(directory.path().join("slices")).unwrap();
        let done = perform_all(&place, &mut device, vec![grant(107)]);
        assert!(
            matches!(done[..], [DeviceDone::Failed { failure: DeviceFailure::Error(_), .. }]),
            "{done:?}"
        );
    }

    #[test]
    fn slice_that_another_host_has_is_reported_with_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let (place, mut device) = (place(directory.path()), None);
        perform_all(&place, &mut device, vec![grant(100)]);
        let (slice, epoch, host) = (SliceId(100), Epoch(2), HostId(1));
        let done = perform_all(&place, &mut device, vec![DeviceCall::Grant { slice, epoch, host }]);
        let [DeviceDone::Failed { failure, .. }] = &done[..] else { panic!("{done:?}") };
        assert_eq!(*failure, DeviceFailure::Held { epoch: Epoch(1), host: HostId(0) });
    }
}
