//! Highest fencing token of the managers that this host has had. A manager with a lower one was replaced by another
//! manager, and does not know this yet. The token is stored in the runtime directory, so that a restarted agent does
//! not accept orders of such a manager.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use units::FencingToken;

use crate::runtime_dir::{RuntimeDir, RuntimeDirError, read, write_durably};

/// Name of the file in the runtime directory.
const FILE: &str = "manager-token";

/// Manager whose orders the agent must not accept.
#[derive(Debug, thiserror::Error)]
pub enum ManagerTokenError {
    /// Another manager with a higher token has been elected.
    #[error("the manager has fencing token {token}, but another one with {highest} was elected later")]
    Earlier {
        /// Token of the manager.
        token: FencingToken,
        /// Highest known token.
        highest: FencingToken,
    },
    /// The token cannot be stored.
    #[error("cannot store the fencing token of the manager")]
    Store(#[from] RuntimeDirError),
}

/// Highest known token, and its file.
#[derive(Debug)]
pub struct ManagerToken {
    path: PathBuf,
    highest: Mutex<FencingToken>,
}

impl ManagerToken {
    /// Reads the token from the runtime directory of the agent.
    ///
    /// # Errors
    /// [`RuntimeDirError::Corrupt`] if the file contains no token, or [`RuntimeDirError::Io`].
    pub fn load(runtime_dir: &RuntimeDir) -> Result<Self, RuntimeDirError> {
        let path = runtime_dir.path().join(FILE);
        let highest = match read(&path)? {
            None => FencingToken::default(),
            Some(text) => match text.parse() {
                Ok(token) => token,
                Err(_) => {
                    return Err(RuntimeDirError::Corrupt {
                        path,
                        text,
                        rule: "two numbers, such as 1.7; a removed file is created again",
                    });
                }
            },
        };
        Ok(Self { path, highest: Mutex::new(highest) })
    }

    /// Checks that no later manager is known, and stores the token of a later one durably.
    ///
    /// # Errors
    /// [`ManagerTokenError`].
    pub fn check(&self, token: FencingToken) -> Result<(), ManagerTokenError> {
        let mut highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        if token < *highest {
            return Err(ManagerTokenError::Earlier { token, highest: *highest });
        }
        if token > *highest {
            write_durably(&self.path, token.to_string().as_bytes())?;
            *highest = token;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn token(generation: u64, election: u64) -> FencingToken {
        FencingToken { generation, election }
    }

    #[test]
    fn earlier_manager_is_rejected_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        let tokens = ManagerToken::load(&runtime_dir).unwrap();
        tokens.check(token(1, 0)).unwrap();
        tokens.check(token(1, 7)).unwrap();
        tokens.check(token(1, 7)).unwrap();
        let restarted = ManagerToken::load(&runtime_dir).unwrap();
        for tokens in [&tokens, &restarted] {
            let error = tokens.check(token(1, 6)).unwrap_err().to_string();
            assert_eq!(
                error,
                "the manager has fencing token 1.6, but another one with 1.7 was elected later"
            );
        }
        restarted.check(token(2, 1)).unwrap();
        assert!(restarted.check(token(1, 9)).is_err());
    }

    #[test]
    fn damaged_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let runtime_dir = RuntimeDir::lock(dir.path()).unwrap();
        for text in ["", "7", "1.x", "01.2", "1.2.3"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            let error = ManagerToken::load(&runtime_dir).unwrap_err().to_string();
            assert!(error.contains("two numbers, such as 1.7"), "{text}: {error}");
        }
    }
}
