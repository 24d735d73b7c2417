//! The file system that all hosts of a rack begin with. Which host one is says its kernel's command line, so that there is one for all.

use super::{
    control::COMMAND_SERVER_SCRIPT,
    plan::{KERNEL, Plan},
};
use crate::{Artifacts, GUEST_MODULES, HostError, Initrd, RACK_MODULES};

/// What is loaded when it is needed, and not before: where there is memory that nobody has divided, it takes all of it.
const DEFERRED_MODULE: &str = "kmem";

/// What a host does before its plan's script: `modprobe` finds what is loaded later, a network, and the two lines in.
const SETUP_SCRIPT: &str = r#"
hostname $HOST
modules=/lib/modules/$(uname -r)
mkdir -p $modules
ln -s /modules/kmem.ko $modules/kmem.ko
echo "kmem.ko:" > $modules/modules.dep
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ifconfig eth0 10.0.2.15 netmask 255.255.255.0
route add default gw 10.0.2.2
stty -F /dev/ttyS3 raw
control &
while :; do setsid -c sh -c 'exec sh -i < /dev/ttyS1 > /dev/ttyS1 2>&1'; done &
"#;
/// A first process that ends takes its kernel along.
const SLEEP_FOREVER: &str = "\nwhile :; do sleep 3600; done";

/// Makes it.
///
/// # Errors
/// Something is not there.
pub(super) fn build(artifacts: &Artifacts, plan: &Plan) -> Result<Initrd, HostError> {
    let modules: Vec<&str> =
        GUEST_MODULES.iter().chain(RACK_MODULES).copied().filter(|name| *name != DEFERRED_MODULE).collect();
    let initrd =
        Initrd::new(artifacts, KERNEL, &modules, &format!("{SETUP_SCRIPT}{}{SLEEP_FOREVER}", plan.script))?;
    let deferred = artifacts
        .module(KERNEL, DEFERRED_MODULE)
        .ok_or_else(|| HostError::Missing(DEFERRED_MODULE.into()))?;
    initrd.copy(&deferred, &format!("modules/{DEFERRED_MODULE}.ko"))?;
    initrd.write("bin/control", COMMAND_SERVER_SCRIPT)?;
    for program in &plan.programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        initrd.program(program, &format!("bin/{name}"))?;
    }
    plan.files.iter().try_for_each(|(from, name)| initrd.copy(from, name))?;
    Ok(initrd)
}
