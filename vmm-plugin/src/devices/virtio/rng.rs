//! A source of random numbers (VIRTIO 1.2, section 5.4): the host kernel's.

use std::io::Write as _;

use super::{Broken, Chain, Device};
use crate::{confine::threads::Work, memory::GuestMemory};

const KIND: u32 = 4;
const QUEUES: &[u16] = &[64];
/// The most that is handed out for one request; a driver that wants more asks again.
const BYTES_MAX: usize = 4096;

/// Random numbers.
#[derive(Debug)]
pub struct Rng;

impl Device for Rng {
    fn kind(&self) -> u32 {
        KIND
    }

    fn work(&self) -> Work {
        Work::Random
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> &'static [u16] {
        QUEUES
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn serve(&mut self, _: usize, chain: Chain<'_>, memory: &GuestMemory) -> Result<Option<u32>, Broken> {
        let mut writer = chain.writer(memory)?;
        let mut random = [0; BYTES_MAX];
        let wanted = writer.available_bytes().min(BYTES_MAX);
        let got = rustix::rand::getrandom(&mut random[..wanted], rustix::rand::GetRandomFlags::empty());
        let got = got.map_err(std::io::Error::from)?;
        writer.write_all(&random[..got])?;
        Ok(Some(u32::try_from(got).expect("a few")))
    }
}
