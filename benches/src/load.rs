//! Closed-loop clients: each sends a request, waits for the reply, and repeats. A [`Writer`]
//! defines the requests, so that two servers are loaded by the same loop.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;

use crate::{
    disk::{microseconds, record},
    failure::Failure,
};

/// One client of a server that makes things durable.
pub trait Writer: Send + 'static {
    /// Asks for one durable write, the `number`th of this load, and returns when it is answered.
    fn write(&mut self, number: u64) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// When a load ends: whichever comes first.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// After so long.
    pub after: Duration,
    /// After so many writes of all clients together.
    pub writes_max: u64,
}

/// Result of a load.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Answered writes.
    pub writes: u64,
    /// From the first question to the last answer.
    pub elapsed: Duration,
    /// How long each answer took, in microseconds.
    pub times_us: Histogram<u64>,
}

impl Outcome {
    /// Answered writes in a second.
    pub fn per_second(&self) -> f64 {
        self.times_us.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// The time within which this part of the answers came, in microseconds.
    pub fn within_us(&self, part: f64) -> f64 {
        self.times_us.value_at_quantile(part) as f64
    }
}

/// Lets all writers loose at once until the end.
///
/// # Errors
/// The first refusal of a server: a load that is refused is no measurement.
pub async fn run<W: Writer>(writers: Vec<W>, ends: Ends) -> Result<(Outcome, Vec<W>), Failure> {
    let (start, next) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for writer in writers {
        clients.spawn(one_client(writer, Arc::clone(&next), start + ends.after, ends.writes_max));
    }
    let (mut times_us, mut writers) = (microseconds(), Vec::new());
    while let Some(done) = clients.join_next().await {
        let (writer, times) = done.expect("a client does not panic and is not cancelled")?;
        times_us.add(times).expect("all histograms have one shape");
        writers.push(writer);
    }
    Ok((Outcome { writes: times_us.len(), elapsed: start.elapsed(), times_us }, writers))
}

async fn one_client<W: Writer>(
    mut writer: W,
    next: Arc<AtomicU64>,
    end: Instant,
    writes_max: u64,
) -> Result<(W, Histogram<u64>), Failure> {
    let mut times = microseconds();
    loop {
        let asked = Instant::now();
        if asked >= end {
            break;
        }
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= writes_max {
            break;
        }
        writer.write(number).await?;
        record(&mut times, asked.elapsed());
    }
    Ok((writer, times))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counts(Vec<u64>);

    impl Writer for Counts {
        async fn write(&mut self, number: u64) -> Result<(), Failure> {
            self.0.push(number);
            tokio::task::yield_now().await;
            Ok(())
        }
    }

    #[tokio::test]
    async fn every_write_is_done_once_and_counted_once() {
        let writers = (0..7).map(|_| Counts(Vec::new())).collect();
        let ends = Ends { after: Duration::from_secs(600), writes_max: 1000 };
        let (outcome, writers) = run(writers, ends).await.unwrap();
        let mut numbers: Vec<u64> = writers.into_iter().flat_map(|writer| writer.0).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
        assert_eq!((outcome.writes, outcome.times_us.len()), (1000, 1000));
    }

    struct Refused;

    impl Writer for Refused {
        async fn write(&mut self, number: u64) -> Result<(), Failure> {
            Err(Failure::Answer { what: format!("write {number}"), answer: "no".to_owned() })
        }
    }

    #[tokio::test]
    async fn a_refused_load_is_no_measurement() {
        let ends = Ends { after: Duration::from_secs(600), writes_max: 10 };
        assert!(run(vec![Refused], ends).await.is_err());
    }
}
