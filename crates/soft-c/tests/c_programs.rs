//! Compiles C programs against the header and both libraries, and runs them, also under Valgrind.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");
const C_FLAGS: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];
/// Folder of the dynamic loader in the folder of Valgrind.
const LOADER_DIR: &str = "lib/x86_64-linux-gnu";

/// Library that a program uses.
#[derive(Clone, Copy)]
enum Linking {
    Shared,
    Static,
}

/// Folder with the libraries as they are installed, and for programs.
fn workspace() -> TempDir {
    // Cargo builds the libraries before the tests, into the folder of the test programs.
    let test = env::current_exe().unwrap();
    let built = test.parent().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (from, to) in [
        ("libtarnsoft.so", "libtarnsoft.so"),
        ("libtarnsoft.so", "libtarnsoft.so.0"),
        ("libtarnsoft.a", "libtarnsoft.a"),
    ] {
        fs::copy(built.join(from), folder.path().join(to)).unwrap_or_else(|error| panic!("{from}: {error}"));
    }
    folder
}

/// Returns the system libraries of the static library, as documented for pkg-config.
fn private_libraries() -> Vec<String> {
    let line = include_str!("../tarnsoft.pc.in").lines().find_map(|line| line.strip_prefix("Libs.private: "));
    line.expect("the template lists libraries").split(' ').map(str::to_owned).collect()
}

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Compiles a C program of this package, and returns its path.
fn compile(workspace: &TempDir, source: &str, linking: Linking, options: &[String]) -> PathBuf {
    let program = workspace.path().join("program");
    let mut command = Command::new("cc");
    command.args(C_FLAGS).args(["-pthread", "-o"]).arg(&program).arg(Path::new(PACKAGE).join(source));
    command.arg("-I").arg(Path::new(PACKAGE).join("include")).args(options);
    let folder = workspace.path().display();
    match linking {
        Linking::Shared => {
            command.args([format!("-L{folder}"), format!("-Wl,-rpath,{folder}"), "-ltarnsoft".to_owned()])
        }
        Linking::Static => command.arg(workspace.path().join("libtarnsoft.a")).args(private_libraries()),
    };
    run(&mut command);
    program
}

/// Returns the folder with Valgrind: `TARN_VALGRIND` if set; otherwise the folder into which `cargo xtask test`
/// downloads it.
fn valgrind_folder() -> PathBuf {
    let folder = env::var_os("TARN_VALGRIND").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(PACKAGE).join("../../target/valgrind"));
    assert!(
        folder.join("valgrind").exists(),
        "{} is missing: run `cargo xtask test`, which downloads Valgrind",
        folder.join("valgrind").display()
    );
    folder.canonicalize().unwrap()
}

/// Runs the test of the interface under memcheck.
fn check_memory(linking: Linking) {
    let (workspace, valgrind) = (workspace(), valgrind_folder());
    // The C library of this folder has the debug symbols that memcheck needs.
    let libraries = valgrind.join(LOADER_DIR).display().to_string();
    let options = [
        format!("-Wl,--dynamic-linker={libraries}/ld-linux-x86-64.so.2"),
        format!("-Wl,--disable-new-dtags,-rpath,{libraries}"),
    ];
    let program = compile(&workspace, "tests/interface.c", linking, &options);
    let mut command = Command::new(valgrind.join("valgrind"));
    command.args(["--tool=memcheck", "--leak-check=full", "--errors-for-leak-kinds=definite,possible"]);
    command.args(["--error-exitcode=99", "--fair-sched=yes"]);
    let output = run(command.arg(program));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all checks passed\n");
    let report = String::from_utf8_lossy(&output.stderr);
    assert!(report.contains("ERROR SUMMARY: 0 errors"), "{report}");
    // A forked child reports only errors, with another process ID.
    let processes: BTreeSet<_> = report.lines().map(|line| line.split("==").nth(1)).collect();
    assert_eq!(processes.len(), 1, "{report}");
}

#[test]
fn interface_of_shared_library_works() {
    let workspace = workspace();
    let output = run(&mut Command::new(compile(&workspace, "tests/interface.c", Linking::Shared, &[])));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all checks passed\n");
}

#[test]
fn interface_of_static_library_works() {
    let workspace = workspace();
    let output = run(&mut Command::new(compile(&workspace, "tests/interface.c", Linking::Static, &[])));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all checks passed\n");
}

#[test]
fn shared_library_has_no_memory_errors() {
    check_memory(Linking::Shared);
}

#[test]
fn static_library_has_no_memory_errors() {
    check_memory(Linking::Static);
}

#[test]
fn example_loses_its_oldest_entries() {
    let workspace = workspace();
    let output = run(&mut Command::new(compile(&workspace, "examples/soft_list.c", Linking::Shared, &[])));
    let lost: String = (0..12).map(|number| format!("lost: entry {number}\n")).collect();
    let expected = lost + "pages revoked: 4\nentries: 8, lost: 12\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn shared_library_exports_only_the_functions_of_the_header() {
    let workspace = workspace();
    let library = workspace.path().join("libtarnsoft.so");
    let output =
        run(Command::new("nm").args(["--dynamic", "--defined-only", "--format=just-symbols"]).arg(library));
    let mut exported: Vec<_> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let header = include_str!("../include/tarnsoft.h");
    let declared = header.lines().filter(|line| line.ends_with(';') || line.ends_with(','));
    let mut declared: Vec<_> = declared
        .filter_map(|line| {
            let (before, _) = line.split_once('(')?;
            let name = before.rsplit([' ', '*']).next()?;
            (name.starts_with("soft_") && !line.starts_with([' ', 't'])).then(|| name.to_owned())
        })
        .collect();
    exported.sort_unstable();
    declared.sort_unstable();
    assert_eq!(exported, declared);
}

#[test]
fn header_is_valid_cxx() {
    let workspace = workspace();
    let mut command = Command::new("c++");
    command.args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]);
    command
        .arg(Path::new(PACKAGE).join("include"))
        .arg(Path::new(PACKAGE).join("tests/header.cpp"))
        .arg("-o")
        .arg(workspace.path().join("header"));
    command.arg(workspace.path().join("libtarnsoft.a")).args(private_libraries());
    run(&mut command);
    run(&mut Command::new(workspace.path().join("header")));
}
