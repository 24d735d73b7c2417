//! Priority of a tenant's I/O by the class of its evictions, for the I/O scheduler of the swap device.

use tiering::evict::{CLASSES, FlowClass};

use crate::host::sysfs::Sysfs;

/// Weights of the classes 1 to 7. Each is √2 times the next, so that a tenant can gain at most the factor 8
/// by claiming urgency. The paper does not print the weights of the queues of its switches.
const WEIGHTS: [u32; CLASSES as usize] = [400, 283, 200, 141, 100, 71, 50];
/// Weight of a cgroup without a class, which is the default of the kernel.
pub(super) const WEIGHT_DEFAULT: u32 = 100;

/// Returns the weight of a class.
pub(super) fn weight(class: FlowClass) -> u32 {
    WEIGHTS[usize::from(class.number() - FlowClass::URGENT.number())]
}

/// Method of setting the priority of I/O, which depends on the I/O scheduler of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IoPriority {
    /// The scheduler shares the device by weights.
    Weight {
        /// File of the cgroup, such as `io.bfq.weight`.
        file: &'static str,
        /// Number of the device, such as `8:0`. The weight applies only to this device.
        device: String,
    },
    /// The scheduler serves real-time I/O first. Applies to the I/O of the tenant on all devices.
    RealTime,
    /// The scheduler has no priorities of cgroups.
    Unsupported {
        /// Name of the scheduler; empty if the device has none.
        scheduler: String,
    },
}

impl IoPriority {
    /// Finds the method for a device. `sys` is the root of sysfs.
    pub fn find(sys: &Sysfs, device: &str) -> Self {
        let queue = format!("dev/block/{device}/queue/scheduler");
        let schedulers = sys.text(queue).unwrap_or_default();
        let active = schedulers.split_whitespace().find_map(|name| name.strip_prefix('[')?.strip_suffix(']'));
        match active.unwrap_or_default() {
            "bfq" => Self::Weight { file: "io.bfq.weight", device: device.to_owned() },
            "mq-deadline" => Self::RealTime,
            scheduler => Self::Unsupported { scheduler: scheduler.to_owned() },
        }
    }

    /// Returns the file of the cgroup, and the value for a class. `None` if there is no method.
    pub fn setting(&self, class: FlowClass) -> Option<(&'static str, String)> {
        match self {
            Self::Weight { file, device } => Some((file, format!("{device} {}", weight(class)))),
            Self::RealTime if class == FlowClass::URGENT => Some((PRIORITY_FILE, "promote-to-rt".to_owned())),
            Self::RealTime => Some((PRIORITY_FILE, NO_CHANGE.to_owned())),
            Self::Unsupported { .. } => None,
        }
    }

    /// Returns the file of the cgroup, and the value that restores the default.
    pub fn default_setting(&self) -> Option<(&'static str, String)> {
        match self {
            Self::Weight { file, device } => Some((file, format!("{device} default"))),
            Self::RealTime => Some((PRIORITY_FILE, NO_CHANGE.to_owned())),
            Self::Unsupported { .. } => None,
        }
    }

    /// Describes the method.
    pub fn description(&self) -> String {
        match self {
            Self::Weight { file, .. } => format!("classes are weights of the scheduler bfq ({file})"),
            Self::RealTime => format!(
                "the most urgent class is real-time I/O of the scheduler mq-deadline ({PRIORITY_FILE})"
            ),
            Self::Unsupported { scheduler } if scheduler.is_empty() => {
                "classes have no effect on I/O: the device has no I/O scheduler".to_owned()
            }
            Self::Unsupported { scheduler } => format!(
                "classes have no effect on I/O: the scheduler {scheduler} has no priorities of cgroups"
            ),
        }
    }
}

/// File with the rule for I/O priorities of a cgroup.
const PRIORITY_FILE: &str = "io.prio.class";
/// Rule that leaves the priorities unchanged.
const NO_CHANGE: &str = "no-change";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    fn find(schedulers: &str) -> IoPriority {
        let fake = FakeSysfs::new(&[("dev/block/43:0/queue/scheduler", schedulers)]);
        IoPriority::find(&fake.sysfs, "43:0")
    }

    fn class(remaining: f64) -> FlowClass {
        FlowClass::by_remaining_memory(remaining)
    }

    #[test]
    fn bfq_gets_weights_for_the_device() {
        let priority = find("none mq-deadline [bfq]");
        let setting = |class| priority.setting(class).unwrap();
        assert_eq!(setting(FlowClass::URGENT), ("io.bfq.weight", "43:0 400".to_owned()));
        assert_eq!(setting(class(0.05)), ("io.bfq.weight", "43:0 283".to_owned()));
        assert_eq!(setting(FlowClass::LEAST_URGENT), ("io.bfq.weight", "43:0 50".to_owned()));
        assert_eq!(priority.default_setting().unwrap(), ("io.bfq.weight", "43:0 default".to_owned()));
    }

    #[test]
    fn mq_deadline_gets_real_time_for_blocked_tenants_only() {
        let priority = find("[mq-deadline] none");
        let setting = |class| priority.setting(class).unwrap();
        assert_eq!(setting(FlowClass::URGENT), ("io.prio.class", "promote-to-rt".to_owned()));
        assert_eq!(setting(class(0.05)), ("io.prio.class", "no-change".to_owned()));
        assert_eq!(priority.default_setting().unwrap(), ("io.prio.class", "no-change".to_owned()));
    }

    #[test]
    fn other_schedulers_are_reported_as_unsupported() {
        for (schedulers, message) in [
            ("[none] mq-deadline", "the scheduler none has no priorities of cgroups"),
            ("", "the device has no I/O scheduler"),
        ] {
            let priority = find(schedulers);
            assert_eq!(priority.setting(FlowClass::URGENT), None);
            assert!(priority.description().ends_with(message), "{}", priority.description());
        }
    }
}
