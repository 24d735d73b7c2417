//! Queries the rack like an operator: by `tarn` with JSON output, which is a stable interface.

use std::{path::Path, process::Output};

use serde::{Deserialize, de::DeserializeOwned};

use super::{
    rack::Rack,
    service::{Programs, command},
};
use crate::failure::Failure;

/// A host, as far as the story needs it.
#[derive(Clone, Debug, Deserialize)]
pub struct Host {
    /// Its name.
    pub host: String,
    /// Its state in lower case.
    pub state: String,
    /// Slices it has.
    pub slices: u32,
    /// VMs it runs.
    pub reservations: u32,
}

#[derive(Clone, Debug, Deserialize)]
struct Slice {
    slice: u32,
    host: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Emc {
    draining: u32,
}

/// `tarn`, and which rack to ask.
#[derive(Debug)]
pub struct Ask<'a> {
    tarn: &'a Path,
    uri: String,
}

impl<'a> Ask<'a> {
    /// Asks this rack.
    pub fn new(programs: &'a Programs, rack: &Rack) -> Self {
        Self { tarn: &programs.tarn, uri: rack.uri() }
    }

    /// Whether the manager answers at all.
    ///
    /// # Errors
    /// `tarn` does not start.
    pub fn answers(&self) -> Result<bool, Failure> {
        Ok(self.run(&["get", "rack"])?.status.success())
    }

    /// Every host.
    ///
    /// # Errors
    /// No answer, or one that is not understood.
    pub fn hosts(&self) -> Result<Vec<Host>, Failure> {
        self.json(&["get", "hosts"])
    }

    /// Returns whether a host is in one of these states; false without a reply.
    ///
    /// # Errors
    /// An answer that is not understood.
    pub fn state_is(&self, host: &str, states: &[&str]) -> Result<bool, Failure> {
        let hosts = self.hosts().or_else(|failure| match failure {
            Failure::Step { .. } => Ok(Vec::new()),
            other => Err(other),
        })?;
        Ok(hosts.iter().any(|seen| seen.host == host && states.contains(&seen.state.as_str())))
    }

    /// The slices that a host has.
    ///
    /// # Errors
    /// No answer, or one that is not understood.
    pub fn slices_of(&self, host: &str) -> Result<Vec<u32>, Failure> {
        let slices: Vec<Slice> = self.json(&["get", "slices"])?;
        let held = slices.into_iter().filter(|slice| slice.host.as_deref() == Some(host));
        Ok(held.map(|slice| slice.slice).collect())
    }

    /// Whether no slice is on its way from one owner to the next.
    ///
    /// # Errors
    /// No answer, or one that is not understood.
    pub fn nothing_drains(&self) -> Result<bool, Failure> {
        let emcs: Vec<Emc> = self.json(&["get", "emcs"])?;
        Ok(emcs.iter().all(|emc| emc.draining == 0))
    }

    /// Gives an order.
    ///
    /// # Errors
    /// It was refused.
    pub fn order(&self, words: &[&str]) -> Result<(), Failure> {
        self.answer(words).map(drop)
    }

    /// A list as people read it.
    ///
    /// # Errors
    /// No answer.
    pub fn table(&self, kind: &str) -> Result<String, Failure> {
        let answer = self.answer(&["get", kind])?;
        Ok(String::from_utf8_lossy(&answer.stdout).into_owned())
    }

    fn json<T: DeserializeOwned>(&self, words: &[&str]) -> Result<T, Failure> {
        let words = [words, &["--output", "json"]].concat();
        let answer = self.answer(&words)?;
        serde_json::from_slice(&answer.stdout).map_err(|wrong| Failure::Answer {
            program: format!("tarn {}", words.join(" ")),
            why: wrong.to_string(),
        })
    }

    fn answer(&self, words: &[&str]) -> Result<Output, Failure> {
        let answer = self.run(words)?;
        if answer.status.success() {
            return Ok(answer);
        }
        let said = String::from_utf8_lossy(&answer.stderr);
        Err(Failure::Step {
            step: format!("tarn {}: {}", words.join(" "), said.trim()),
            status: answer.status,
        })
    }

    fn run(&self, words: &[&str]) -> Result<Output, Failure> {
        command(self.tarn)
            .args(["--endpoint", &self.uri])
            .args(words)
            .output()
            .map_err(Failure::start("tarn"))
    }
}
