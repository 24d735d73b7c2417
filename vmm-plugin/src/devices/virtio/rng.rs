//! Entropy device (VIRTIO 1.2, section 5.4), backed by getrandom(2).

use std::io::Write as _;

use super::{Chain, GuestDriverError, VirtioDevice};
use crate::{memory::GuestMemory, thread_role::ThreadRole};

const VIRTIO_ID_RNG: u32 = 4;
const QUEUE_SIZES: &[u16] = &[64];
/// Maximum number of bytes per request. A driver that needs more bytes sends another request.
const REQUEST_BYTES_MAX: usize = 4096;

/// Entropy device of a guest.
#[derive(Debug)]
pub struct VirtioRng;

impl VirtioDevice for VirtioRng {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Rng
    }

    fn device_features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }

    fn config_space(&self) -> Vec<u8> {
        Vec::new()
    }

    fn process_chain(
        &mut self,
        _: usize,
        chain: Chain<'_>,
        memory: &GuestMemory,
    ) -> Result<Option<u32>, GuestDriverError> {
        let mut writer = chain.writer(memory)?;
        let mut random = [0; REQUEST_BYTES_MAX];
        let requested = writer.available_bytes().min(REQUEST_BYTES_MAX);
        let count = rustix::rand::getrandom(&mut random[..requested], rustix::rand::GetRandomFlags::empty());
        let count = count.map_err(std::io::Error::from)?;
        writer.write_all(&random[..count])?;
        Ok(Some(u32::try_from(count).expect("the count is at most REQUEST_BYTES_MAX")))
    }
}
