//! tuner
