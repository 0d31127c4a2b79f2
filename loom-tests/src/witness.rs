//! Witnesses: what a handler does, watched by loom.

use loom::cell::UnsafeCell;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// Something that happens once and must be visible to whoever relies on it: loom panics when
/// [`rely`](Self::rely) and [`happen`](Self::happen) are not ordered by the code under test.
///
/// Not `Sync`, as no cell is. loom's threads take turns on one thread of the system and may share
/// it through an `Rc`, which, unlike an `Arc` of loom's, adds nothing to explore and no order.
#[derive(Debug, Default)]
pub struct Effect {
    happened: Cell<bool>,
    order: UnsafeCell<()>,
}

impl Effect {
    /// Nothing has happened yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The effect.
    ///
    /// # Panics
    /// When it happens twice; when somebody relies on it without being ordered after it.
    pub fn happen(&self) {
        self.order.with_mut(|_| ());
        assert!(!self.happened.replace(true), "an effect happened twice");
    }

    /// Relies on the effect.
    ///
    /// # Panics
    /// When it has not happened, or is not ordered before.
    pub fn rely(&self) {
        assert!(self.happened.get(), "relied on what has not happened");
        self.order.with(|_| ());
    }
}

/// Records of one partition and what their handlers did.
#[derive(Debug)]
pub struct Handled {
    records: Vec<(i64, Effect)>,
}

impl Handled {
    /// Records at these offsets, none of them handled. Ascending.
    pub fn none_of(offsets: &[i64]) -> Rc<Self> {
        let records = offsets.iter().map(|offset| (*offset, Effect::new())).collect();
        Rc::new(Handled { records })
    }

    /// What the handler of the record at `offset` does.
    ///
    /// # Panics
    /// When there is no such record, or when it is handled twice.
    pub fn handle(&self, offset: i64) {
        self.effect(offset).happen();
    }

    /// The effect of the record at `offset`.
    ///
    /// # Panics
    /// When there is no such record.
    pub fn effect(&self, offset: i64) -> &Effect {
        let record = self.records.iter().find(|(at, _)| *at == offset);
        &record.unwrap_or_else(|| panic!("no record at offset {offset}")).1
    }

    /// Relies on a watermark, as a commit does: all records below it are handled, and all that
    /// their handlers did is visible here.
    ///
    /// # Panics
    /// When one is not, or when the watermark is not the offset after a record's.
    pub fn rely_below(&self, watermark: i64, start: i64) {
        let after_a_record = self.records.iter().any(|(offset, _)| offset + 1 == watermark);
        assert!(watermark == start || after_a_record, "watermark {watermark} stands nowhere");
        for (_, effect) in self.records.iter().filter(|(offset, _)| *offset < watermark) {
            effect.rely();
        }
    }
}

/// A value whose destructor uses loom. It is forgotten, not destroyed, when a panic goes through:
/// once loom has found an execution wrong, nothing more can be run in it, and a second panic in a
/// destructor would end the process instead of the test.
#[derive(Debug)]
pub struct Spared<T>(Option<T>);

impl<T> Spared<T> {
    /// Takes it in.
    pub fn new(value: T) -> Self {
        Spared(Some(value))
    }
}

impl<T> Deref for Spared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is taken by the drop only")
    }
}

impl<T> DerefMut for Spared<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it is taken by the drop only")
    }
}

impl<T> Drop for Spared<T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}
