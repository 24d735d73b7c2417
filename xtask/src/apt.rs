//! Downloads Debian packages with private package lists and unpacks them into a folder. Nothing is
//! installed on this machine, and root is not required.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{failure::Failure, step::step};

/// apt with its own lists, cache and status in a folder.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Configures apt in a folder, and fetches the package lists of these suites.
    ///
    /// # Errors
    /// apt-get is missing, or the package source cannot be reached.
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
        step("package lists of Debian", apt.command("apt-get").args(["--quiet", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf"));
        command
    }

    /// Returns the first dependency of a package: for a kernel metapackage, the newest kernel.
    ///
    /// # Errors
    /// It has no dependency.
    pub fn first_dependency(&self, suite: &str, package: &str) -> Result<String, Failure> {
        let mut command = self.command("apt-cache");
        let output = output_of(command.args(["--target-release", suite, "depends", package]))?;
        let first = output.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        first.map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
            program: "apt-cache".to_owned(),
            why: format!("{package} of {suite} has no dependency: {output:?}"),
        })
    }

    /// Downloads packages and unpacks them into a folder.
    ///
    /// # Errors
    /// A package does not exist, or cannot be fetched.
    pub fn unpack(&self, suite: &str, packages: &[&str], into: &Path) -> Result<(), Failure> {
        let cache = self.fresh_cache()?;
        let mut download = self.command("apt-get");
        download.args(["--quiet", "--target-release", suite, "download"]).args(packages).current_dir(&cache);
        step(&format!("fetch {}", packages.join(", ")), &mut download)?;
        unpack_all(&cache, into)
    }

    /// Downloads a package with its dependencies and unpacks them into a folder.
    ///
    /// # Errors
    /// A package does not exist, or cannot be fetched.
    pub fn unpack_with_dependencies(&self, suite: &str, package: &str, into: &Path) -> Result<(), Failure> {
        let cache = self.fresh_cache()?;
        let mut install = self.command("apt-get");
        install.args(["--quiet=2", "--yes", "--download-only", "--target-release", suite]).arg("-o");
        install.arg(format!("Dir::Cache::archives={}", cache.display())).args(["install", package]);
        step(&format!("fetch {package} and its dependencies"), &mut install)?;
        unpack_all(&cache, into)
    }

    fn fresh_cache(&self) -> Result<PathBuf, Failure> {
        let cache = self.dir.join("fetched");
        let _ = fs::remove_dir_all(&cache); // it may not be there
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

/// Returns the URI of the Debian mirror in the apt configuration of this machine, which may not
/// have fetched its lists yet.
fn mirror() -> Result<String, Failure> {
    let mut command = Command::new("apt-get");
    let targets = output_of(command.args(["indextargets", "--no-release-info", "--format", "$(REPO_URI)"]))?;
    debian_source(&targets).map(str::to_owned).ok_or_else(|| Failure::UnexpectedOutput {
        program: "apt-get".to_owned(),
        why: format!("no Debian package source is configured: {targets:?}"),
    })
}

/// Returns the source of Debian itself among all sources of a machine; others may have suites of
/// the same name.
fn debian_source(targets: &str) -> Option<&str> {
    targets.lines().find(|place| place.trim_end_matches('/').ends_with("/debian"))
}

/// Returns the output of a program.
///
/// # Errors
/// It does not start, or fails.
pub fn output_of(command: &mut Command) -> Result<String, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Failure::start(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Failure::UnexpectedOutput {
            program,
            why: String::from_utf8_lossy(&output.stderr).into_owned(),
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
