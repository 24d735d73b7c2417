//! Builds the initrd that all hosts of a rack share. A host reads its name from its kernel command
//! line, so the initrd is the same for all hosts.

use super::{
    control::COMMAND_SERVER_SCRIPT,
    plan::{Plan, RACK_KERNEL},
};
use crate::{Artifacts, GUEST_MODULES, HostError, Initrd, RACK_MODULES};

/// Kernel module that is not loaded at boot, because it claims all undivided dax ranges when it is
/// loaded. The agent loads the module.
const DEFERRED_MODULE: &str = "kmem";

/// Shell script that runs before the script of the plan. Enables `modprobe` of the deferred module,
/// configures the network, and starts the command server and the shell.
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
/// End of the init script: an endless loop, because the kernel panics if the init process ends.
const SLEEP_FOREVER_SCRIPT: &str = "\nwhile :; do sleep 3600; done";

/// Builds the initrd for the hosts of a plan.
///
/// # Errors
/// [`HostError`] if a file is missing or cannot be copied.
pub(super) fn build(artifacts: &Artifacts, plan: &Plan) -> Result<Initrd, HostError> {
    let modules: Vec<&str> =
        GUEST_MODULES.iter().chain(RACK_MODULES).copied().filter(|name| *name != DEFERRED_MODULE).collect();
    let initrd = Initrd::new(
        artifacts,
        RACK_KERNEL,
        &modules,
        &format!("{SETUP_SCRIPT}{}{SLEEP_FOREVER_SCRIPT}", plan.script),
    )?;
    let deferred = artifacts
        .module_path(RACK_KERNEL, DEFERRED_MODULE)
        .ok_or_else(|| HostError::Missing(DEFERRED_MODULE.into()))?;
    initrd.add_file_copy(&deferred, &format!("modules/{DEFERRED_MODULE}.ko"))?;
    initrd.add_file("bin/control", COMMAND_SERVER_SCRIPT)?;
    for program in &plan.programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        initrd.add_program(program, &format!("bin/{name}"))?;
    }
    if plan.has_qemu {
        initrd.add_qemu(artifacts)?;
    }
    plan.files.iter().try_for_each(|(from, name)| initrd.add_file_copy(from, name))?;
    Ok(initrd)
}
