//! Rule: unsafe code is in a few listed files. Each block has a SAFETY comment, which clippy
//! requires.

use super::{Complaint, sources::Sources};

/// Files that may contain unsafe code, with the reason.
const MAY_BE_UNSAFE: &[(&str, &str)] = &[
    ("benches/empty_slice.rs", "memset is told about memory by address"),
    ("benches/frigid_predict.rs", "LightGBM's library speaks C"),
    ("tests/src/small_guests.rs", "a guest's code is what lies between two labels"),
    (
        "host-agent/src/host/memory/bus_error.rs",
        "a signal handler is handed its facts by pointer, and puts memory where there is none",
    ),
    ("host-agent/src/host/memory/mapped.rs", "a device is touched by address, past the caches"),
    ("host-agent/src/host/memory/numa.rs", "mbind and move_pages are told about memory by address"),
    (
        "host-agent/src/host/slices/detached.rs",
        "a thread that may be stuck in the kernel gives up the descriptors of its process",
    ),
    (
        "host-agent/src/readiness.rs",
        "tokio must be promised that a descriptor stays open while it is watched",
    ),
    ("vmm-plugin/src/confine/sigsys.rs", "a signal handler is handed its facts by pointer"),
    ("vmm-plugin/src/exit.rs", "a signal handler may only end the process with _exit"),
    ("vmm-plugin/src/memory.rs", "KVM and the kernel are told about mappings by address"),
    ("vmm-plugin/src/memory/fault.rs", "a signal handler is handed its facts by pointer"),
    ("vmm-plugin/src/vcpu/mce.rs", "KVM's machine checks are ioctls that kvm-ioctls lacks"),
    ("vmm-plugin/src/tap.rs", "a tap device is named by an ioctl"),
];

/// Complains about each other file that does.
pub fn places(sources: &Sources) -> Vec<Complaint> {
    let others = sources.rust.iter().filter(|file| !MAY_BE_UNSAFE.iter().any(|(path, _)| file.path == *path));
    let found = others.filter_map(|file| {
        let (line, _) = file.idents().into_iter().find(|(_, ident)| ident == "unsafe")?;
        Some(Complaint {
            path: file.path.clone(),
            line,
            what: "unsafe code in a file that is not known for it".to_owned(),
            mend: "find a safe interface, or add the file to MAY_BE_UNSAFE in xtask/src/tidy/unsafety.rs",
        })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::{places as at, sources};

    #[test]
    fn unsafe_code_in_a_new_place_is_found() {
        let safe = ("a.rs", "//! A.\n#![forbid(unsafe_code)]\n// unsafe\n");
        let not = ("b.rs", "//! B.\nfn b() {\n    unsafe { c() }\n}\n");
        assert_eq!(at(&places(&sources(&[safe, not]))), ["b.rs:3"]);
    }
}
