//! Sets the soname of the shared library. Its number is increased when programs must be compiled again.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libtarnsoft.so.0");
}
