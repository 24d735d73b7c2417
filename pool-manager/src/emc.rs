//! One thread per EMC: it opens the device, makes its calls in order and reports. Slices are the rack's numbers outside
//! and the device's own inside; this is where they are translated.

use std::{path::PathBuf, sync::mpsc, thread};

use pool::{
    manager::{Contents, DeviceCall, DeviceDone, DeviceFailure, Grant},
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
        None => {
            place.driver.open(&place.path, place.slices, &place.serial).map(|opened| device.insert(opened))
        }
    };
    let result = opened.and_then(|device| place.make(device.as_mut(), &call));
    result.unwrap_or_else(|error| {
        let failure = match error {
            DeviceError::StaleEpoch { highest, .. } => DeviceFailure::StaleEpoch { highest },
            refused @ DeviceError::NotStopped { .. } => DeviceFailure::NotFenced(refused.to_string()),
            other => DeviceFailure::Error(units::chain(&other)),
        };
        if let DeviceFailure::Error(message) = &failure {
            tracing::warn!(emc = %place.name, ?call, error = message, "device call failed");
        }
        DeviceDone::Failed { call, failure }
    })
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
