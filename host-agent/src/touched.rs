//! How much of its memory each guest has touched, by its VMM's word: kept for whoever looks, and told to the manager with the next report.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use units::ReservationId;

/// Bytes a guest has touched so far, by its VMM's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Of local memory.
    pub local: u64,
    /// Of pool memory.
    pub pool: u64,
}

/// What VMMs have said, and whether the manager has been told.
#[derive(Debug, Default)]
pub struct TouchedBook(Mutex<BTreeMap<ReservationId, (Touched, bool)>>);

impl TouchedBook {
    /// A poisoned book is still right: no call leaves it half written.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReservationId, (Touched, bool)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A VMM has said this of its guest.
    pub fn note(&self, id: ReservationId, touched: Touched) {
        self.lock().insert(id, (touched, false));
    }

    /// A VM is over, and everybody knows.
    pub fn forget(&self, id: ReservationId) {
        self.lock().remove(&id);
    }

    /// What the manager has not been told; from now on it has.
    pub fn take_news(&self) -> Vec<(ReservationId, Touched)> {
        let mut book = self.lock();
        let news = book.iter_mut().filter(|(_, (_, is_told))| !is_told);
        news.map(|(id, (touched, is_told))| {
            *is_told = true;
            (*id, *touched)
        })
        .collect()
    }

    /// Another session begins: everything is to be told anew.
    pub fn tell_again(&self) {
        self.lock().values_mut().for_each(|(_, is_told)| *is_told = false);
    }

    /// Everything.
    pub fn all(&self) -> BTreeMap<ReservationId, Touched> {
        self.lock().iter().map(|(id, (touched, _))| (*id, *touched)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_are_told_once_and_everything_again_to_another_session() {
        let (book, id) = (TouchedBook::default(), ReservationId(1));
        let touched = |pool| Touched { local: 1, pool };
        book.note(id, touched(2));
        assert_eq!(book.take_news(), [(id, touched(2))]);
        assert_eq!(book.take_news(), []);
        book.note(id, touched(3));
        book.tell_again();
        assert_eq!(book.take_news(), [(id, touched(3))]);
        book.tell_again();
        book.forget(id);
        assert_eq!((book.take_news().len(), book.all().len()), (0, 0));
    }
}
