//! `cargo xtask install`: installs the programs, the C library of soft memory, systemd units, examples and manual
//! pages, like a package of a Linux distribution.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    failure::Failure,
    repository::{cargo, root},
    step::run_step,
};

/// Names of the installed programs.
const INSTALLED_PROGRAMS: [&str; 5] = ["pool-manager", "host-agent", "soft-cache", "vmm-plugin", "tarn"];
/// Cargo packages of [`INSTALLED_PROGRAMS`] and of the C library. The package `host-agent` contains two programs.
const CARGO_PACKAGES: [&str; 5] = ["pool-manager", "host-agent", "vmm-plugin", "cli", "soft-c"];
/// Other installed files: path in the repository, and path below the root directory.
const INSTALLED_FILES: [(&str, &str); 10] = [
    ("pool-manager/pool-manager.service", "usr/lib/systemd/system/pool-manager.service"),
    ("host-agent/host-agent.service", "usr/lib/systemd/system/host-agent.service"),
    ("host-agent/soft-cache.service", "usr/lib/systemd/system/soft-cache.service"),
    ("pool-manager/sysusers.conf", "usr/lib/sysusers.d/tarn.conf"),
    ("pool-manager/rack.example.toml", "usr/share/doc/tarn/rack.example.toml"),
    ("host-agent/host.example.toml", "usr/share/doc/tarn/host.example.toml"),
    ("crates/soft-c/include/tarnsoft.h", "usr/include/tarnsoft.h"),
    ("crates/soft-c/examples/soft_list.c", "usr/share/doc/tarn/soft_list.c"),
    ("README.md", "usr/share/doc/tarn/README.md"),
    ("CHANGELOG.md", "usr/share/doc/tarn/CHANGELOG.md"),
];

/// Folder of the C library, below the root directory.
const LIBRARY_FOLDER: &str = "usr/lib";
/// Name with which programs load the C library, as in `crates/soft-c/build.rs`.
const SONAME: &str = "libtarnsoft.so.0";
const PKG_CONFIG_TEMPLATE: &str = "crates/soft-c/tarnsoft.pc.in";

/// Options of `install`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Root directory of the installation, such as the image of a host
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Builds the programs in release mode and installs all files. Does not change the configuration in
/// `/etc/tarn`.
///
/// # Errors
/// Returns an error if the build fails or a file cannot be written.
pub fn run(args: &Args) -> Result<(), Failure> {
    let mut build = cargo(&["build", "--release"]);
    build.args(CARGO_PACKAGES.iter().flat_map(|package| ["-p", package]));
    run_step("build the programs", &mut build)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let release = target.join("release");
    for program in INSTALLED_PROGRAMS {
        install(&release.join(program), &args.root.join("usr/bin").join(program), 0o755)?;
    }
    for (from, to) in INSTALLED_FILES {
        install(&root().join(from), &args.root.join(to), 0o644)?;
    }
    install_library(&release, &args.root)?;
    let manual_pages = args.root.join("usr/share/man/man1");
    create_folder(&manual_pages)?;
    run_step("write manual pages", Command::new(release.join("tarn")).arg("man").arg(&manual_pages))?;
    println!(
        "\nNext, on the machine of the manager: systemd-sysusers; write /etc/tarn/rack.toml (see /usr/share/doc/tarn); \n\
         install -d -o tarn -g tarn -m 700 /var/lib/tarn; runuser -u tarn -- pool-manager init; \n\
         systemctl daemon-reload; systemctl enable --now pool-manager\n\
         On each host: write /etc/tarn/host.toml and its token (mode 0600); systemctl daemon-reload; \n\
         systemctl enable --now host-agent"
    );
    Ok(())
}

/// Installs the C library and its pkg-config file. `libtarnsoft.so.0` is a link for running programs, and
/// `libtarnsoft.so` a link for the linker.
fn install_library(release: &Path, install_root: &Path) -> Result<(), Failure> {
    let folder = install_root.join(LIBRARY_FOLDER);
    let version = env!("CARGO_PKG_VERSION");
    let shared = format!("libtarnsoft.so.{version}");
    install(&release.join("libtarnsoft.so"), &folder.join(&shared), 0o644)?;
    install(&release.join("libtarnsoft.a"), &folder.join("libtarnsoft.a"), 0o644)?;
    for (link, target) in [(SONAME, &*shared), ("libtarnsoft.so", SONAME)] {
        let (link, partial) = (folder.join(link), folder.join(format!(".{link}.new")));
        let _ = fs::remove_file(&partial); // an interrupted installation may have left it
        symlink(target, &partial).map_err(Failure::file_error("create", &partial))?;
        fs::rename(&partial, &link).map_err(Failure::file_error("install", &link))?;
        println!("{}", link.display());
    }
    let template = root().join(PKG_CONFIG_TEMPLATE);
    let template = fs::read_to_string(&template).map_err(Failure::file_error("read", &template))?;
    let pkg_config = folder.join("pkgconfig/tarnsoft.pc");
    create_folder(pkg_config.parent().expect("the path has a folder"))?;
    let text = template.replace("@VERSION@", version);
    fs::write(&pkg_config, text).map_err(Failure::file_error("write", &pkg_config))?;
    println!("{}", pkg_config.display());
    Ok(())
}

/// Installs a file: copies the file to a temporary name, sets its mode, and renames the copy. The
/// file of a running program is thus replaced, not overwritten.
fn install(from: &Path, to: &Path, mode: u32) -> Result<(), Failure> {
    let folder = to.parent().expect("a file has a folder");
    create_folder(folder)?;
    let partial = folder.join(format!(".{}.new", to.file_name().expect("it has a name").display()));
    fs::copy(from, &partial).map_err(Failure::file_error("copy", from))?;
    let result = fs::set_permissions(&partial, fs::Permissions::from_mode(mode));
    result.map_err(Failure::file_error("set the mode of", &partial))?;
    fs::rename(&partial, to).map_err(Failure::file_error("install", to))?;
    println!("{}", to.display());
    Ok(())
}

fn create_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(Failure::file_error("create", folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_units_run_only_installed_programs() {
        for (from, to) in INSTALLED_FILES.iter().filter(|(from, _)| from.ends_with(".service")) {
            let unit = fs::read_to_string(root().join(from)).unwrap();
            let lines = unit.lines().filter_map(|line| line.strip_prefix("ExecStart"));
            let programs: Vec<_> = lines.filter_map(|line| line.split(['=', ' ']).nth(1)).collect();
            // The services with a configuration file check it before they start.
            let expected = if from.ends_with("soft-cache.service") { 1 } else { 2 };
            assert_eq!(programs.len(), expected, "{to}");
            for program in programs {
                let name = program.strip_prefix("/usr/bin/").expect(program);
                assert!(INSTALLED_PROGRAMS.contains(&name), "{to} runs {program}");
            }
        }
    }

    #[test]
    fn users_of_systemd_units_are_created() {
        let users = fs::read_to_string(root().join("pool-manager/sysusers.conf")).unwrap();
        let users: Vec<&str> =
            users.lines().filter_map(|line| line.strip_prefix("u ")?.split(' ').next()).collect();
        assert_eq!(users, ["tarn", "tarn-cache"]);
        for (unit, user) in
            [("pool-manager/pool-manager.service", "tarn"), ("host-agent/soft-cache.service", "tarn-cache")]
        {
            let unit = fs::read_to_string(root().join(unit)).unwrap();
            assert!(unit.lines().any(|line| line == format!("User={user}")), "{unit}");
        }
    }

    #[test]
    fn library_is_installed_with_links_and_version() {
        let folder = tempfile::tempdir().unwrap();
        let (release, target) = (folder.path().join("release"), folder.path().join("root"));
        fs::create_dir(&release).unwrap();
        for name in ["libtarnsoft.so", "libtarnsoft.a"] {
            fs::write(release.join(name), name).unwrap();
        }
        for _ in 0..2 {
            install_library(&release, &target).unwrap();
        }
        for name in ["libtarnsoft.so", "libtarnsoft.so.0", "libtarnsoft.so.0.1.0"] {
            assert_eq!(fs::read_to_string(target.join("usr/lib").join(name)).unwrap(), "libtarnsoft.so");
        }
        let pkg_config = fs::read_to_string(target.join("usr/lib/pkgconfig/tarnsoft.pc")).unwrap();
        assert!(pkg_config.contains("\nVersion: 0.1.0\n") && !pkg_config.contains('@'), "{pkg_config}");
        let build_script = fs::read_to_string(root().join("crates/soft-c/build.rs")).unwrap();
        assert!(build_script.contains(&format!("-soname,{SONAME}\"")));
    }

    #[test]
    fn installed_file_has_given_mode_and_replaces_older_file() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("new"), root.path().join("usr/bin/tarn"));
        for text in ["old", "new"] {
            fs::write(&from, text).unwrap();
            install(&from, &to, 0o755).unwrap();
            assert_eq!(fs::read_to_string(&to).unwrap(), text);
            assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
        }
        assert_eq!(fs::read_dir(to.parent().unwrap()).unwrap().count(), 1);
        let missing = install(&root.path().join("missing"), &to, 0o755).unwrap_err().to_string();
        assert!(missing.contains("missing"), "{missing}");
        assert_eq!(fs::read_to_string(&to).unwrap(), "new");
    }
}
