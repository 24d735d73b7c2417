//! Downloads Debian packages with private package lists and unpacks them into a folder. No package
//! is installed on this machine, and root is not required.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{failure::Failure, step::step};

/// Instance of apt with private package lists, cache and status in a folder.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Configures apt in a folder, and downloads the package lists of these Debian suites.
    ///
    /// # Errors
    /// Returns an error if apt-get is missing or the mirror cannot be reached.
    pub fn prepare(dir: &Path, suites: &[&str]) -> Result<Self, Failure> {
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(folder)).map_err(Failure::file("create", dir))?;
        }
        let mirror = mirror()?;
        let source = |suite: &&str| {
            let key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
            format!("deb [{key}] {mirror} {suite} main\n")
        };
        let place = dir.display();
        let settings = format!(
            "Dir::Etc::sourcelist \"{place}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
             Dir::State::lists \"{place}/lists\";\nDir::State::status \"{place}/status\";\n\
             Dir::Cache \"{place}/cache\";\nAPT::Install-Recommends \"false\";\nAPT::Sandbox::User \"root\";\n"
        );
        let sources: String = suites.iter().map(source).collect();
        for (name, content) in [("sources.list", sources), ("status", String::new()), ("apt.conf", settings)]
        {
            fs::write(dir.join(name), content).map_err(Failure::file("write", dir.join(name)))?;
        }
        let apt = Self { dir: dir.to_owned() };
        step("download Debian package lists", apt.command("apt-get").args(["--quiet", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf"));
        command
    }

    /// Returns the first dependency of a package. For a kernel metapackage, this is the newest
    /// kernel.
    ///
    /// # Errors
    /// Returns an error if the package has no dependency.
    pub fn first_dependency(&self, suite: &str, package: &str) -> Result<String, Failure> {
        let mut command = self.command("apt-cache");
        let output = output_of(command.args(["--target-release", suite, "depends", package]))?;
        let first = output.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        first.map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
            program: "apt-cache".to_owned(),
            reason: format!("package {package} of suite {suite} has no dependency: {output:?}"),
        })
    }

    /// Downloads packages and unpacks them into a folder.
    ///
    /// # Errors
    /// Returns an error if a package does not exist or cannot be downloaded.
    pub fn unpack(&self, suite: &str, packages: &[&str], into: &Path) -> Result<(), Failure> {
        let cache = self.fresh_cache()?;
        let mut download = self.command("apt-get");
        download.args(["--quiet", "--target-release", suite, "download"]).args(packages).current_dir(&cache);
        step(&format!("download {}", packages.join(", ")), &mut download)?;
        unpack_all(&cache, into)
    }

    /// Downloads a package with its dependencies and unpacks them into a folder.
    ///
    /// # Errors
    /// Returns an error if a package does not exist or cannot be downloaded.
    pub fn unpack_with_dependencies(&self, suite: &str, package: &str, into: &Path) -> Result<(), Failure> {
        let cache = self.fresh_cache()?;
        let mut install = self.command("apt-get");
        install.args(["--quiet=2", "--yes", "--download-only", "--target-release", suite]).arg("-o");
        install.arg(format!("Dir::Cache::archives={}", cache.display())).args(["install", package]);
        step(&format!("download {package} and its dependencies"), &mut install)?;
        unpack_all(&cache, into)
    }

    fn fresh_cache(&self) -> Result<PathBuf, Failure> {
        let cache = self.dir.join("fetched");
        let _ = fs::remove_dir_all(&cache); // the folder may not exist
        fs::create_dir_all(cache.join("partial")).map_err(Failure::file("create", &cache))?;
        Ok(cache)
    }
}

fn unpack_all(cache: &Path, into: &Path) -> Result<(), Failure> {
    fs::create_dir_all(into).map_err(Failure::file("create", into))?;
    for entry in fs::read_dir(cache).map_err(Failure::file("read", cache))?.filter_map(Result::ok) {
        let archive = entry.path();
        if archive.extension().is_some_and(|extension| extension == "deb") {
            output_of(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(into))?;
        }
    }
    fs::remove_dir_all(cache).map_err(Failure::file("remove", cache))
}

/// Returns the URI of the Debian mirror from the apt configuration of this machine. Works also if
/// this machine has no package lists.
fn mirror() -> Result<String, Failure> {
    let mut command = Command::new("apt-get");
    let targets = output_of(command.args(["indextargets", "--no-release-info", "--format", "$(REPO_URI)"]))?;
    debian_source(&targets).map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
        program: "apt-get".to_owned(),
        reason: format!("no Debian mirror is configured: {targets:?}"),
    })
}

/// Returns the URI of the Debian mirror among all package sources of a machine. Other sources may
/// have suites with the same names.
fn debian_source(targets: &str) -> Option<&str> {
    targets.lines().find(|place| place.trim_end_matches('/').ends_with("/debian"))
}

/// Runs a program and returns its stdout.
///
/// # Errors
/// Returns an error if the program does not start or exits with a failure.
pub fn output_of(command: &mut Command) -> Result<String, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Failure::start(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Failure::UnexpectedOutput {
            program,
            reason: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_source_is_found_among_other_sources() {
        let targets = "http://a.example/cli/\nhttp://b.example/debian-security/\nhttp://b.example/debian/\n";
        assert_eq!(debian_source(targets), Some("http://b.example/debian/"));
        assert_eq!(debian_source("http://a.example/ubuntu/\n"), None);
    }
}
